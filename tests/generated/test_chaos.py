"""Processes, hosts and Ray nodes that are killed, stopped and interrupted at random, nightly.

After each round every row is stored once, or listed as failed, and no process, lock or file is left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import chaos
import processes
import pytest
from stored import ranges, read_rows

from devicemap.store.database import DATABASE, LOCK

SECONDS = 60 * float(os.environ.get("DEVICEMAP_CHAOS_MINUTES", "20"))
"""How long each test runs."""

ROUND_SECONDS = 20.0
EXIT_SECONDS = 20.0
"""A process has started, or has ended after an interruption, within this time."""


def _start(target: Any, log: Path, *arguments: Any) -> Any:
    """Start a process that calls a function of `chaos`. The attribute `ready` is set when it does."""
    ready = processes.forks.Event()
    process: Any = processes.forks.Process(
        target=chaos.run, args=(target, str(log), ready, *arguments), name=target.__name__
    )
    process.ready = ready
    process.start()
    return process


def _send(process: Any, number: int) -> None:
    """Send a signal to a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


class Round:
    """Two writers and a reader of a directory."""

    def __init__(self, directory: Path, seed: int):
        self.directory, self.draw, self.log = directory / "out", random.Random(seed), directory / "errors"
        self.rows = 8 * self.draw.randrange(10, 200)
        self.alive: list[Any] = []
        self.happened = Counter[str]()

    def start(self, target: Any) -> Any:
        """Start a process that calls a function of `chaos`."""
        seed = self.draw.randrange(2**31)
        arguments = str(self.directory), self.rows, seed
        process = _start(target, self.log, *arguments)
        self.alive.append(process)
        return process

    def disturb(self) -> None:
        """Start a process, or do something to one of those that run."""
        for process in [process for process in self.alive if not process.is_alive()]:
            self.end(process)
        missing = Counter(write=2, read=1) - Counter(process.name for process in self.alive)
        for name in missing.elements():
            self.start(getattr(chaos, name))
        process = self.draw.choice(self.alive)
        what = self.draw.choice(["SIGKILL", "SIGINT", "SIGSTOP"])
        if what == "SIGINT":
            assert process.ready.wait(EXIT_SECONDS)
        self.happened[f"{what} {process.name}"] += 1
        _send(process, getattr(signal, what))
        if what == "SIGINT":
            self.end(process)
        elif what == "SIGSTOP":
            time.sleep(self.draw.uniform(0, 0.5))
            _send(process, signal.SIGCONT)

    def end(self, process: Any) -> None:
        """Wait for a process that is to end by itself."""
        process.join(EXIT_SECONDS)
        assert not process.is_alive(), f"{process.name} still runs after SIGINT"
        self.happened[f"{process.name} ended with {process.exitcode}"] += 1
        self.alive.remove(process)

    def finish(self) -> None:
        """Kill all, let one writer finish, and check what is there."""
        for process in self.alive:
            process.kill()
            process.join()
        chaos.check(read_rows(self.directory))
        self.alive.clear()
        writer = self.start(chaos.write)
        writer.join(120)
        assert writer.exitcode == 0, self.errors()
        found = read_rows(self.directory)
        chaos.check(found)
        assert found.keys() == {*range(self.rows)}
        edges = [0, *itertools.chain.from_iterable(ranges(self.directory)), self.rows]
        assert edges[::2] == edges[1::2]
        assert {path.name for path in self.directory.iterdir()} == {DATABASE, f"{DATABASE}-journal", LOCK}
        assert (self.directory / f"{DATABASE}-journal").stat().st_size == 0
        assert not self.errors()

    def errors(self) -> str:
        """Return the errors of all processes of this round."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 600)
def test_writers_and_readers(tmp_path: Path) -> None:
    happened, end = Counter[str](), time.monotonic() + SECONDS
    for seed in itertools.count():
        (tmp_path / str(seed)).mkdir()
        current = Round(tmp_path / str(seed), seed)
        stop = min(end, time.monotonic() + ROUND_SECONDS)
        while time.monotonic() < stop:
            time.sleep(current.draw.uniform(0, 3))
            current.disturb()
        current.finish()
        happened += current.happened
        if time.monotonic() > end:
            break
    print(f"{seed + 1} rounds: {dict(sorted(happened.items()))}")


def _run(target: Any, seed: int, seconds: float, directory: Path) -> Counter[str]:
    """Call a function of `chaos` in a process, and return what it counts."""
    log, counts = directory / f"errors{seed}", processes.forks.SimpleQueue()
    process = _start(target, log, seed, seconds, counts)
    process.join(seconds + 300)
    process.kill()
    assert process.exitcode == 0, log.read_text(encoding="utf-8") if log.exists() else "it hangs"
    return counts.get()


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 600)
def test_hosts(tmp_path: Path) -> None:
    """Two hosts are stopped for a while, again and again, and one is killed at the end."""
    end, counts = time.monotonic() + SECONDS, Counter[str]()
    for seed in itertools.count():
        counts += _run(chaos.disturb_hosts, seed, min(60.0, SECONDS), tmp_path)
        if time.monotonic() > end:
            break
    print(f"{seed + 1} clusters: {dict(counts)}")


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 600)
def test_ray_nodes(tmp_path: Path) -> None:
    """Nodes of a cluster are killed during jobs, and others take their place."""
    pytest.importorskip("ray.data", reason="Ray Data is not installed")
    print(dict(_run(chaos.disturb_ray_nodes, 0, SECONDS, tmp_path)))
