"""What a call on a few rows costs, against the best graph that a hand could write for the same devices.

    python benchmarks/call_cost.py              # 1, 2, 8 and 16 logical CPU devices, each in a process of its own

The hand-written graph does what devicemap promises and no more: a tf.function with a static tf.split, a tf.device block per
device, the function's ops inlined, and tf.concat or a TensorArray outside of the blocks. The better of the two counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import tensorflow as tf
from measuring import compare, machine, median, save, spread

import devicemap

DEVICES = (1, 2, 8, 16)
MOST = 1.10
ROWS = 16


def fn(batch: Any) -> Any:
    return tf.sin(batch) * 2.0


def by_hand(devices: list[str], array: bool) -> Any:
    @tf.function
    def step(x: Any) -> Any:
        parts = tf.split(x, len(devices)) if len(devices) > 1 else [x]
        results = []
        for part, device in zip(parts, devices):
            with tf.device(device):
                results.append(fn(part))
        if not array:
            return tf.concat(results, 0)
        gathered = tf.TensorArray(x.dtype, size=len(devices), infer_shape=False, element_shape=[None, 3])
        for i, result in enumerate(results):
            gathered = gathered.write(i, result)
        return gathered.concat()

    return step


def measure(count: int, rounds: int) -> dict[str, Any]:
    """In this process: seconds per call, and seconds to the first result."""
    devicemap.simulate_devices(count)
    devices = [device.name for device in devicemap.list_devices("CPU")]
    x = tf.random.normal([ROWS, 3])
    concat, array = by_hand(devices, False), by_hand(devices, True)
    mapper = devicemap.DeviceMap(fn, batched=True)
    start = time.perf_counter()
    mapper(x)
    first = time.perf_counter() - start
    ways = {"hand, tf.concat": lambda: concat(x), "hand, TensorArray": lambda: array(x), "devicemap": lambda: mapper(x)}
    return {"calls": compare(ways, rounds, calls=20), "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="measure this many only, and print JSON")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if options.devices:
        print(json.dumps(measure(options.devices, options.rounds)))
        return
    lines = [
        f"# Cost of a call on {ROWS} rows\n",
        f"{machine()}. Medians of {options.rounds} rounds of 20 calls, in microseconds, ± half the distance of the quartiles. "
        f"The ratio is to the better hand-written graph; at most {MOST} is allowed.\n",
        "| devices | hand, tf.concat | hand, TensorArray | devicemap | ratio | first call, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    measured, too_slow = {}, []
    for count in DEVICES:
        command = [sys.executable, __file__, "--devices", str(count), "--rounds", str(options.rounds)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = measured[count] = json.loads(output.splitlines()[-1])
        calls = result["calls"]
        ratio = median(calls["devicemap"]) / min(median(s) for name, s in calls.items() if name.startswith("hand"))
        cells = [f"{1e6 * median(s):.0f} ± {1e6 * median(s) * spread(s):.0f}" for s in calls.values()]
        lines.append(f"| {count} | {' | '.join(cells)} | {ratio:.2f} | {result['first']:.2f} |")
        if ratio > MOST:
            too_slow.append(f"{count} devices: {ratio:.2f}")
    save("call_cost", "\n".join(lines) + "\n", measured)
    if too_slow:
        sys.exit(f"slower than {MOST} times the hand-written graph: {', '.join(too_slow)}")


if __name__ == "__main__":
    main()
