"""Results on disk: writing and loading rows against NumPy's files, and opening a directory of many chunks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from devicemap.store.database import Header, StoredChunk, open_for_writing
from devicemap.store.encoding import describe_nest

WIDTH, ROWS, QUICK_ROWS = 25_000, 4000, 64
"""Rows of 100 kB, 400 MB in all."""

CHUNK_ROWS = 40
CHUNKS, QUICK_CHUNKS = 160_000, 200
MOST_RATIO, MOST_SECONDS = 2.0, 1.0


class _Writing:
    """A way that writes to a path, which is removed before the clock is started."""

    def __init__(self, path: Path, write: Callable[[Path], Any]):
        self._path, self._write = path, write

    def prepare(self) -> None:
        """Remove what the last turn wrote, and wait for the disk."""
        if self._path.is_dir():
            shutil.rmtree(self._path)
        self._path.unlink(missing_ok=True)
        os.sync()

    def __call__(self) -> Any:
        return self._write(self._path)


def _save(path: Path, rows: Any) -> Any:
    with open(path, "wb") as file:
        np.save(file, rows)
        file.flush()
        os.fsync(file.fileno())
    return np.load(path, mmap_mode="r")[-1:]


@pytest.fixture
def mapper(real_devices: list[str]) -> devicemap.DeviceMap:
    base = tf.random.stateless_uniform([WIDTH], [0, 0])
    return devicemap.DeviceMap(lambda n: n * base, batch_size=CHUNK_ROWS, devices=real_devices)


def test_write(compare: Compare, mapper: devicemap.DeviceMap, scale: Scale, tmp_path: Path) -> None:
    """Rows that cost little but to be written."""
    rows = tf.range(float(QUICK_ROWS if scale.quick else ROWS))
    ways = {
        "devicemap": _Writing(tmp_path / "out", lambda path: mapper.write(rows, path)[-1:]),
        "map, np.save, fsync": _Writing(tmp_path / "rows.npy", lambda path: _save(path, mapper(rows).numpy())),
    }
    targets = {"most ratio": {"devicemap": MOST_RATIO}}
    case = f"write {len(rows)} rows of {WIDTH * 4 // 1000} kB"
    compare(ways, case, targets=targets, patience_seconds=30.0)


def test_load(compare: Compare, mapper: devicemap.DeviceMap, scale: Scale, tmp_path: Path) -> None:
    """From the page cache, so that the disk does not hide what is computed."""
    rows = tf.range(float(QUICK_ROWS if scale.quick else ROWS))
    results = mapper.write(rows, tmp_path / "out")
    path = tmp_path / "rows.bin"
    path.write_bytes(results.load())

    def read() -> Any:
        return np.frombuffer(path.read_bytes(), np.float32).reshape(-1, WIDTH)

    ways = {"devicemap": lambda: devicemap.open_results(results.directory).load(), "read the bytes": read}
    targets = {"most ratio": {"devicemap": MOST_RATIO}}
    case = f"load {len(rows)} rows of {WIDTH * 4 // 1000} kB"
    compare(ways, case, rounds=10, targets=targets, patience_seconds=30.0)


def test_open(compare: Compare, scale: Scale, tmp_path: Path) -> None:
    chunks = QUICK_CHUNKS if scale.quick else CHUNKS
    call = {"results": describe_nest(tf.TensorSpec([None], tf.float32)), "reducer": None}
    stored = [(StoredChunk(row, row + 1, ""), [np.array([row], np.float32)]) for row in range(chunks)]
    with open_for_writing(tmp_path) as writer:
        writer.put(Header(call, chunks), *stored)
    ways = {"devicemap": lambda: devicemap.open_results(tmp_path)[-1:]}
    targets = {"most seconds": {"devicemap": MOST_SECONDS}}
    compare(ways, f"open {chunks} chunks", answer=[chunks - 1.0], targets=targets)
