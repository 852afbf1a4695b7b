"""Programs that start, get ready, and on a word give their first result: `python -m benchmarks.starting NAME WAY DEVICES`.

A program's first call of TensorFlow pays for more than any later one, so that each turn needs a program of its own.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import devicemap
from benchmarks import hardware, peers
from benchmarks.functions import Case, cases
from benchmarks.measuring import Way

ROWS = 32
"""Rows of the first call."""


def by_devicemap(case: Case, devices: list[str]) -> Way:
    """A map that is made in each call."""
    x = case.data[:ROWS]
    return lambda: devicemap.DeviceMap(lambda *args: case.fn(*args), devices=devices, batched=case.batched)(x)


def by_hand(case: Case, devices: list[str]) -> Way:
    """A graph that is made in each call, as the best user writes it: vectorised where that works."""
    x = case.data[:ROWS]

    def rows(batch: Any) -> Any:
        if case.batched:
            return case.fn(batch)
        try:
            return tf.vectorized_map(tf.function(case.fn), batch, fallback_to_while_loop=False)
        except ValueError:
            return tf.map_fn(tf.function(case.fn), batch, fn_output_signature=tf.float32)

    return lambda: peers.graph_blocks(rows, devices, "tf.concat")(x)


WAYS = {"devicemap": by_devicemap, "by-hand": by_hand}


class Program:
    """A program that is about to give its first result."""

    def __init__(self, case: str, way: str, used: int, made: int):
        """On the first `used` of `made` devices. It is ready when this returns."""
        command = [sys.executable, "-m", "benchmarks.starting", case, way, str(used), str(made)]
        root = Path(__file__).parent.parent
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", f"{' '.join(command)} failed"

    def result(self) -> np.ndarray:
        """Its first result, from the word on. There is no second one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        size = int(self._process.stdout.readline())
        return np.load(io.BytesIO(self._process.stdout.read(size)))

    def end(self) -> None:
        """Wait for its end; it has one without the word, too."""
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("used", type=int)
    parser.add_argument("made", type=int)
    arguments = parser.parse_args()
    hardware.cut_devices(arguments.made)
    tf.keras.utils.set_random_seed(0)  # the same weights in each program
    way = WAYS[arguments.way](cases()[arguments.case], hardware.all_devices()[: arguments.used])
    print("ready", flush=True)
    if not sys.stdin.readline():  # the other process has ended
        return
    result = io.BytesIO()
    np.save(result, np.asarray(way()))
    sys.stdout.buffer.write(b"%d\n%s" % (result.tell(), result.getvalue()))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
