"""Real functions on a plain CPU: never slower than the best of what TensorFlow offers for one device.

    python benchmarks/real_functions.py

The peers are written as their best users would: traced with autograph, tf.data with AUTOTUNE, the batched function as one
tf.function. Where vectorized_map lacks an op, it has no row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from functions import Case, cases
from measuring import compare, machine, median, save, spread

import devicemap

MOST = 1.10  # what the noise of a machine with few cores needs


def ways_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Each way as a function without arguments; those that TensorFlow cannot trace are left out."""
    x, fn = case.data, tf.function(case.fn)
    rows = tf.data.Dataset.from_tensor_slices(x)
    mapper = devicemap.DeviceMap(case.fn, batched=case.batched)
    ways: dict[str, Callable[[], Any]] = {}
    if case.batched:
        chunks = rows.batch(64).map(fn, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
        ways["tf.function"] = lambda: fn(x)
        ways["Dataset.map"] = lambda: tf.concat(list(chunks), 0)
    else:
        mapped = tf.function(lambda x: tf.map_fn(fn, x, fn_output_signature=tf.float32))
        vectorized = tf.function(lambda x: tf.vectorized_map(fn, x, fallback_to_while_loop=False))
        whole = rows.map(fn, num_parallel_calls=tf.data.AUTOTUNE).batch(len(x)).prefetch(tf.data.AUTOTUNE)
        ways["tf.map_fn"] = lambda: mapped(x)
        try:
            vectorized(x)
            ways["tf.vectorized_map"] = lambda: vectorized(x)
        except ValueError:
            pass  # an op without a vectorised form
        ways["Dataset.map"] = lambda: next(iter(whole))
    ways["devicemap"] = lambda: mapper(x)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    names = ["tf.function", "tf.map_fn", "tf.vectorized_map", "Dataset.map", "devicemap"]
    lines = [
        "# Real functions on a plain CPU\n",
        f"{machine()}. Medians of {options.rounds} interleaved rounds, in milliseconds for all rows, ± half the distance of "
        "the quartiles in percent. The ratio is to the best peer: below 1, devicemap is faster.\n",
        f"| function | rows | {' | '.join(names)} | ratio |",
        f"| --- | --- | {' | '.join('---' for _ in names)} | --- |",
    ]
    measured, too_slow = {}, []
    for name, case in cases().items():
        seconds = measured[name] = compare(ways_of(case), options.rounds, tolerance=1e-2)
        ratio = median(seconds["devicemap"]) / min(median(s) for way, s in seconds.items() if way != "devicemap")
        cells = [
            f"{1e3 * median(seconds[n]):.1f} ± {100 * spread(seconds[n]):.0f}%" if n in seconds else "" for n in names
        ]
        lines.append(f"| {name} | {len(case.data)} | {' | '.join(cells)} | {ratio:.2f} |")
        print(lines[-1], flush=True)
        if ratio > MOST:
            too_slow.append(f"{name}: {ratio:.2f}")
    save("real_functions", "\n".join(lines) + "\n", measured)
    if too_slow:
        sys.exit(f"slower than {MOST} times the best peer: {', '.join(too_slow)}")


if __name__ == "__main__":
    main()
