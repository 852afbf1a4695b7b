"""Read handwritten digits from three examples of each: the gain from vectorisation, and the gain from devices.

The distance of an image to an example is the least difference after warping (dynamic time warping, Sakoe and Chiba 1978). It
is more expensive than the plain distance, and recognises more digits. See also `--help`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import devicemap

try:
    import matplotlib
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scikit-learn matplotlib") from error

HELD_OUT = 1000  # the last images, by other writers than the first; the others are for the examples
DRAWS, EACH = 3, 3  # three draws of three examples of each digit
WARM_UP, TURNS = 6, 5  # calls in which a map chooses its engine; timed calls


def features(image: tf.Tensor) -> tf.Tensor:
    """An image `[8, 8]` -> ink and edges of its rows, and of its columns: `[2, 8, 8, 3]`."""
    ink = tf.pad(image, [[1, 1], [1, 1]])
    lines = tf.stack([image, ink[1:-1, 2:] - ink[1:-1, :-2], ink[2:, 1:-1] - ink[:-2, 1:-1]], -1)
    return tf.stack([lines, tf.transpose(lines, [1, 0, 2])])


def warped_distance(pair: dict[str, tf.Tensor]) -> tf.Tensor:
    """The function to map: `{"image": [8, 8], "example": [8, 8]}` -> their distance after warping, a scalar.

    A line of the image matches the same line of the example or a neighbour, shifted along itself by up to a pixel.
    """
    image, example = features(pair["image"]), tf.pad(features(pair["example"]), [[0, 0], [0, 0], [1, 1], [0, 0]])
    own = tf.reshape(image, [2, 8, 24])
    moved = tf.reshape(tf.stack([example[:, :, shift : shift + 8] for shift in range(3)], 1), [2, 24, 24])
    squares = tf.reduce_sum(own**2, -1)[:, :, None] + tf.reduce_sum(moved**2, -1)[:, None]
    apart = tf.reshape(squares - 2 * tf.matmul(own, moved, transpose_b=True), [2, 8, 3, 8])
    cost = tf.reduce_min(apart, 2)  # of matching two lines, [2, 8, 8]
    least: dict[tuple[int, int], tf.Tensor] = {}
    for i in range(8):
        for j in range(max(0, i - 1), min(8, i + 2)):
            before = [least[cell] for cell in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if cell in least]
            least[i, j] = cost[:, i, j] + (tf.reduce_min(tf.stack(before), 0) if before else 0.0)
    return tf.reduce_sum(least[7, 7])


def medians(ways: dict[str, Callable[[], tf.Tensor]]) -> dict[str, float]:
    """The median seconds of a call of each way. The ways take turns, so that what disturbs the machine disturbs all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, run in ways.items():
            start = time.perf_counter()
            run().numpy()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def draw(report: devicemap.Report, seconds: dict[str, float], file: Path) -> None:
    """Draw when each device computed, as `report.plot("timeline.png")` does, and the seconds of each way."""
    matplotlib.rcParams["font.size"] = 14
    figure = Figure(figsize=(11, 4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for device in report.devices:
        own = [span for span in report.spans if span.shard.device == device.device]
        bars = [(1e3 * span.started_seconds, 1e3 * span.seconds) for span in own]
        left.broken_barh(bars, (len(left.collections), 0.8), facecolors="#0072b2", edgecolors="white")
    names = [device.device.rpartition("device:")[2] for device in report.devices]
    left.set_yticks([0.4 + line for line in range(len(names))], names)
    right.barh([*seconds], [*seconds.values()], color=["#999999", "#d55e00", "#0072b2"])
    right.bar_label(right.containers[0], fmt=" %.2f s")
    right.set(xscale="log", xlim=(min(seconds.values()) / 4, 6 * max(seconds.values())))
    left.set(title="Devices: a bar is a chunk", xlabel="ms since the call began")
    right.set(title="Time of a call", xlabel="seconds, log scale")
    left.invert_yaxis()
    right.invert_yaxis()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, classify, print how often each distance is right and how long each way takes, and draw."""
    parser = argparse.ArgumentParser(description="Read digits by a warped distance; time vectorisation and devices.")
    parser.add_argument("--images", type=int, default=500, metavar="N", help=f"images to read, up to {HELD_OUT} (500)")
    parser.add_argument("--simulate", type=int, metavar="N", help="cut the CPU into N devices; no GPU: one per core")
    parser.add_argument("--output", type=Path, default=Path("output/digits.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if not 1 <= flags.images <= HELD_OUT:
        raise SystemExit(f"--images is {flags.images}; expected 1 to {HELD_OUT}")
    if flags.simulate is None and not tf.config.list_physical_devices("GPU"):
        flags.simulate = max(2, min(8, os.cpu_count() or 1))
        print(f"No GPU: the CPU is cut into {flags.simulate} devices, one per core.")
    if flags.simulate is not None:
        tf.config.threading.set_intra_op_parallelism_threads(1)  # or one device uses the cores of the others
        devicemap.simulate_devices(flags.simulate)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # or GPUs round to three digits
    devices = [device.name for device in devicemap.list_devices("GPU") or devicemap.list_devices("CPU")]
    images, digits = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images) - HELD_OUT)
    examples = images[np.concatenate([order[digits[order] == digit][: DRAWS * EACH] for digit in range(10)])]
    images, digits = (values[-HELD_OUT:][: flags.images] for values in (images, digits))
    repeated, tiled = np.repeat(images, len(examples), 0), np.tile(examples, (len(images), 1, 1))
    pairs = {"image": tf.constant(repeated), "example": tf.constant(tiled)}
    serial = tf.function(lambda pairs: tf.map_fn(warped_distance, pairs, fn_output_signature=tf.float32))
    one, every = (devicemap.DeviceMap(warped_distance, devices=those) for those in (devices[:1], devices))
    start = time.perf_counter()
    every.explain(pairs)  # traces, and computes nothing
    traced = time.perf_counter()
    every(pairs)
    first = time.perf_counter()
    with tf.device(devices[0]):
        warped = serial(pairs).numpy()
        for mapper in [one, every] * WARM_UP:
            np.testing.assert_allclose(mapper(pairs), warped, rtol=1e-3, atol=1e-4)
        names = "tf.map_fn,\n1 device", "vectorised,\n1 device", f"vectorised,\n{len(devices)} devices"
        seconds = medians(dict(zip(names, (lambda: serial(pairs), lambda: one(pairs), lambda: every(pairs)))))
    rows, vectorised, on_all = seconds.values()
    plain = np.linalg.norm(images[:, None] - examples, axis=(2, 3))
    print(f"Right of {len(images)} held-out images, with {DRAWS} draws of {EACH} examples of each digit:")
    for name, distances in {"plain": plain, "warped": warped}.items():
        guesses = distances.reshape(-1, 10, DRAWS, EACH).min(-1).argmin(1)  # [images, draws]
        shares = np.mean(guesses == digits[:, None], 0)
        print(f"{name:>8} distance {shares.mean():.1%}, by draw {', '.join(f'{share:.1%}' for share in shares)}")
    print(f"First call: {first - start:.2f} s. It traces the function in {traced - start:.2f} s, converts its ops to")
    print(f"whole batches, builds a graph for each device, and computes. Later calls take {on_all:.2f} s.")
    print(f"Median seconds: {rows:.3f} tf.map_fn, {vectorised:.3f} vectorised, {on_all:.3f} on {len(devices)} devices")
    print(f"Gain from vectorisation: {rows / vectorised:.1f} x. Gain from devices: {vectorised / on_all:.2f} x.")
    draw(every.report, seconds, flags.output)
    print(f"The last call: {every.report}\nPicture: {flags.output}")


if __name__ == "__main__":
    main()
