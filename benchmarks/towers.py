"""Do the towers of a call run at the same time? The hand-written recipe against devicemap, on simulated devices.

    python benchmarks/towers.py

Logical CPU devices share the cores, so the function here only waits, as for a device that works: 25 ms per row. What is
measured is the order that TensorFlow runs the towers in. The share is ideal time (all rows / devices) by time taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from measuring import RESULTS, compare, machine, median, save

import devicemap

DEVICES = (2, 4, 8)
ROWS = 16
SECONDS_PER_ROW = 0.025


def _wait(batch: np.ndarray) -> np.ndarray:
    time.sleep(SECONDS_PER_ROW * len(batch))
    return batch


def stateless(batch: Any) -> Any:
    """Waits in an op without state."""
    return tf.ensure_shape(tf.numpy_function(_wait, [batch], tf.float32, stateful=False), [None, 3])


def stateful(batch: Any) -> Any:
    """Waits in a tf.numpy_function as most people write it: TensorFlow takes it for stateful."""
    return tf.ensure_shape(tf.numpy_function(_wait, [batch], tf.float32), [None, 3])


def random(batch: Any) -> Any:
    """Waits without state, row by row, in a tf.map_fn that also draws a random number: so all of it has state."""

    def row(values: Any) -> Any:
        return stateless(values[None])[0] + 0.0 * tf.random.normal([])

    return tf.map_fn(row, batch, parallel_iterations=1)


FUNCTIONS = {"stateless": stateless, "random op in a map_fn": random, "numpy_function": stateful}


def by_hand(fn: Callable[[Any], Any], devices: list[str]) -> Any:
    @tf.function
    def step(x: Any) -> Any:
        results = tf.TensorArray(tf.float32, size=len(devices), infer_shape=False, element_shape=[None, 3])
        for i, (shard, device) in enumerate(zip(tf.split(x, len(devices)), devices)):
            with tf.device(device):
                y = fn(shard)
            results = results.write(i, y)
        return results.concat()

    return step


def measure(count: int, rounds: int) -> dict[str, Any]:
    devicemap.simulate_devices(count)
    devices = [device.name for device in devicemap.list_devices("CPU")]
    x = tf.random.normal([ROWS, 3])
    seconds = {}
    for name, fn in FUNCTIONS.items():
        hand, mapper = by_hand(fn, devices), devicemap.DeviceMap(fn, devices=devices, batched=True)
        ways = {"by hand": lambda hand=hand: hand(x), "devicemap": lambda mapper=mapper: mapper(x)}
        seconds[name] = compare(ways, rounds)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="measure this many only, and print JSON")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.devices:
        print(json.dumps(measure(options.devices, options.rounds)))
        return
    measured = {}
    for count in DEVICES:
        command = [sys.executable, __file__, "--devices", str(count), "--rounds", str(options.rounds)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured[count] = json.loads(output.splitlines()[-1])
    lines = [
        "# Share of the ideal time\n",
        f"{machine()}. {ROWS} rows of {1e3 * SECONDS_PER_ROW:.0f} ms, medians of {options.rounds} rounds.\n",
        "| fn | devices | by hand | devicemap |",
        "| --- | --- | --- | --- |",
    ]
    shares: dict[tuple[str, str], list[float]] = {}
    for name in FUNCTIONS:
        for count in measured:
            ideal = ROWS * SECONDS_PER_ROW / count
            row = {way: ideal / median(s) for way, s in measured[count][name].items()}
            for way, share in row.items():
                shares.setdefault((name, way), []).append(share)
            lines.append(f"| {name} | {count} | {row['by hand']:.2f} | {row['devicemap']:.2f} |")
    save("towers", "\n".join(lines) + "\n", measured)
    plot({key: [s * count for s, count in zip(values, measured)] for key, values in shares.items()}, list(measured))


def plot(speedups: dict[tuple[str, str], list[float]], counts: list[int]) -> None:
    """Speed-up against devices, with the ideal line."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot([1, *counts], [1, *counts], color="0.7", linestyle="--", label="ideal")
    styles = dict(zip(FUNCTIONS, ("o", "s", "^")))
    for (name, way), values in speedups.items():
        color = "tab:red" if way == "by hand" else "tab:blue"
        axes.plot([1, *counts], [1, *values], color=color, marker=styles[name], alpha=0.8, label=f"{way}, {name}")
    axes.set(xlabel="simulated devices", ylabel="speed-up", xticks=[1, *counts], title="One call over several devices")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(RESULTS / "towers.png", dpi=120)


if __name__ == "__main__":
    main()
