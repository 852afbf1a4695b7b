"""Seconds to the first result - tracing, optimising, placing and the first run - on one device and on 16.

    python benchmarks/first_result.py

Each number is of a mapper that was never called, less the time of its second call; medians over rounds that take turns.
The hand-written graph inlines the same function in a tf.device block per device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from functions import Case, cases
from measuring import machine, median, save

import devicemap

MANY = 16
ROWS = 32
MOST = 1.5


def seconds_to_first_result(make: Callable[[], Callable[[Any], Any]], x: Any) -> float:
    start = time.perf_counter()
    mapped = make()
    mapped(x)
    first = time.perf_counter() - start
    start = time.perf_counter()
    mapped(x)
    return first - (time.perf_counter() - start)


def mapper(case: Case, devices: list[str]) -> Callable[[], Any]:
    return lambda: devicemap.DeviceMap(lambda *args: case.fn(*args), devices=devices, batched=case.batched)


def by_hand(case: Case, devices: list[str]) -> Callable[[], Any]:
    """As the best user writes it: vectorised where that works."""

    def rows(x: Any) -> Any:
        if case.batched:
            return case.fn(x)
        try:
            return tf.vectorized_map(tf.function(case.fn), x, fallback_to_while_loop=False)
        except ValueError:
            return tf.map_fn(tf.function(case.fn), x, fn_output_signature=tf.float32)

    def step(x: Any) -> Any:
        results = []
        for part, device in zip(tf.split(x, len(devices)), devices):
            with tf.device(device):
                results.append(rows(part))
        return tf.concat(results, 0)

    return lambda: tf.function(step, autograph=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    devicemap.simulate_devices(MANY)
    names = [device.name for device in devicemap.list_devices("CPU")]
    lines = [
        "# Seconds to the first result\n",
        f"{machine()}. {ROWS} rows, medians of {options.rounds} rounds.\n",
        f"| function | devicemap, 1 device | devicemap, {MANY} devices | ratio | by hand, {MANY} devices |",
        "| --- | --- | --- | --- | --- |",
    ]
    measured: dict[str, dict[str, list[float]]] = {}
    for name, case in cases().items():
        x = case.data[:ROWS]
        ways = {
            "1": mapper(case, names[:1]),
            str(MANY): mapper(case, names),
            "by hand": by_hand(case, names),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, make in ways.items():
                seconds[way].append(seconds_to_first_result(make, x))
        measured[name] = seconds
        one, many, hand = (median(seconds[way]) for way in ways)
        lines.append(f"| {name} | {one:.2f} | {many:.2f} | {many / one:.1f} | {hand:.2f} |")
        print(lines[-1], flush=True)
    save("first_result", "\n".join(lines) + "\n", measured)


if __name__ == "__main__":
    main()
