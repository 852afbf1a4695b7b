"""What devices of another process cost, over loopback, against those of this one: chunks, a short call, large rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from benchmarks.programs import Program
from benchmarks.simulator import Simulator

CHUNKS = 20
"""For each device."""

MOST = 1.10
"""At chunks of 50 ms."""

HERE, THERE = "this process", "devicemap.connect"


def _serve(connection: Connection, devices: int) -> None:
    from benchmarks.simulator import load
    from devicemap.cluster import serve

    load()
    connection.send(serve(0, cpus=devices).target.rpartition(":")[2])
    threading.Event().wait()


@pytest.fixture(scope="module")
def connected(pytestconfig: pytest.Config) -> Iterator[None]:
    """To a process that has as many devices."""
    program = Program(_serve, pytestconfig.getoption("--devices"))
    devicemap.connect({"worker": [f"127.0.0.1:{program.connection.recv()}"]})
    yield
    program.end()


def _compare(
    compare: Compare, fn: Callable[[Any], Any], rows: Any, case: str, *, used: int = 1, calls: int = 1, targets: Any = None,
    **options: Any,
) -> None:  # fmt: skip
    maps = {
        name: devicemap.DeviceMap(fn, devices=[f"{host}CPU:{i}" for i in range(used)], **options)
        for name, host in ((HERE, ""), (THERE, "/job:worker/task:0/"))
    }
    ways = {name: lambda mapper=mapper: mapper(rows) for name, mapper in maps.items()}
    compare(ways, case, devices=used, calls=calls, patience_seconds=30, targets=targets or {})


@pytest.mark.parametrize("several", [False, True], ids=["one device", "all devices"])
@pytest.mark.parametrize("numbers", [16, 1 << 18], ids=["rows of 64 bytes", "rows of 1 MB"])
@pytest.mark.parametrize("milliseconds", [50, 10])
def test_chunks(
    compare: Compare, sim: Simulator, connected: None, scale: Scale, milliseconds: int, numbers: int, several: bool
) -> None:
    """A row takes the time of a device alone, which is the same in both processes."""
    used = scale.devices if several else 1
    rows = tf.zeros([used * (2 if scale.quick else CHUNKS), numbers])
    size = "64 bytes" if numbers == 16 else "1 MB"
    _compare(
        compare, lambda row: sim.work(row, milliseconds / 1e3), rows,
        f"{CHUNKS} chunks of {milliseconds} ms and {size} on each device", used=used, batch_size=1, vectorize=False,
        targets={"most ratio": {THERE: MOST}} if milliseconds == 50 else None,
    )  # fmt: skip


def test_short_call(compare: Compare, connected: None) -> None:
    _compare(compare, lambda row: 2 * row, tf.zeros([16, 4]), "a call on 16 rows of 16 bytes", calls=20)


def test_large_rows(compare: Compare, connected: None, scale: Scale) -> None:
    rows = tf.zeros([16, 1 << (10 if scale.quick else 20)])
    _compare(compare, lambda row: row + 1, rows, "16 rows of 4 MB, there and back")
