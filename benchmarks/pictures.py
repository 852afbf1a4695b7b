"""Pictures of devicemap for its documentation: `python -m benchmarks.pictures docs/pictures`, which `make pictures` runs.

Devices are simulated accelerators and emulated GPUs, so the pictures do not depend on free cores. The scaling is drawn from
recorded results. Each picture has a process of its own, because devices of a process cannot change.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BLUE, ORANGE = "#0072b2", "#d55e00"  # distinguishable by colour-blind readers (Okabe and Ito 2008)
STYLES = {
    "graph blocks": ("#d55e00", "s", 13),
    "eager blocks": ("#e69f00", "v", 8),
    "MirroredStrategy": ("#009e73", "^", 10),
    "joblib threads": ("#cc79a7", "D", 7),
    "devicemap": (BLUE, "o", 5),
}
"""Colour, marker and size of each way. Small markers inside of large ones show lines that coincide."""

NAMES = {"graph blocks": "tf.device blocks in a tf.function", "eager blocks": "tf.device blocks, eager"}
RESULTS = Path(__file__).parent / "results" / "raw"
TEXT = {"font.size": 14, "axes.titlesize": 15, "legend.fontsize": 13}  # legible at half size


def draw_timeline(path: Path) -> None:
    """Compare the timelines of a hand-written split and of a call of devicemap, on rows of uneven cost."""
    import numpy as np

    import devicemap
    from benchmarks import jobs, peers, simulator

    devicemap.simulate_devices(4)
    names = [f"CPU:{k}" for k in range(4)]
    devices = simulator.load()
    job = jobs.make_job(len(names), 1.0, jobs.ramp, jobs.equal)
    job.configure(devices)
    data = job.rows, job.seconds
    blocks = peers.graph_blocks(devices.work, names)
    ways: dict[str, Callable[..., Any]] = {
        "tf.device blocks, equal shards": lambda data: blocks(*data),
        "devicemap": devicemap.DeviceMap(devices.work, devices=names, batched=True),
    }
    figure, panels = new_figure(len(ways), (11, 3.6))
    for axes, (title, run), colour in zip(panels, ways.items(), (ORANGE, BLUE)):
        for _ in range(2):  # the first call also traces
            devices.reset()
            np.testing.assert_array_equal(run(data), job.answer)
        calls = devices.calls()
        begin = min(call.start_seconds for call in calls)
        for line, name in enumerate(names):
            bars = [(c.start_seconds - begin, c.end_seconds - c.start_seconds) for c in calls if c.device == name]
            axes.broken_barh(bars, (line - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.6)
        seconds = max(call.end_seconds for call in calls) - begin
        print(f"{title}: {seconds:.2f} s, ideal {job.ideal_seconds:.2f} s")
        axes.axvline(job.ideal_seconds, color="black", linestyle="--", linewidth=1.5)
        axes.set(title=f"{title}: {seconds:.2f} s", xlabel="seconds (dashed: the ideal time)")
    panels[0].set_yticks(range(len(names)), [f"device {line}" for line in range(len(names))])
    panels[0].invert_yaxis()
    figure.savefig(path)


def draw_batch_size(path: Path) -> None:
    """Draw `devicemap.benchmark` of a function on two emulated GPUs of 64 MiB."""
    from benchmarks import softgpu

    gpus = softgpu.start(2, 64 << 20)
    import tensorflow as tf

    import devicemap

    for gpu in range(2):
        gpus.configure(gpu, kernel_seconds=1e-3, element_seconds=2e-9)

    def outer_product(row: Any) -> Any:
        return tf.reduce_sum(tf.sin(tf.tensordot(row, row, 0)))

    sizes = [4, 16, 64, 256, 512, 1024, 1536, 2048]
    result = devicemap.benchmark(outer_product, tf.random.normal([256, 128]), batch_sizes=sizes, seconds=10)
    print(result)
    result.plot(path)


def draw_pipeline(path: Path) -> None:
    """Draw the schedule of a pipeline of four equal stages and eight microbatches."""
    import tensorflow as tf

    import devicemap
    from benchmarks import simulator
    from benchmarks.test_pipeline import stage_of

    devicemap.simulate_devices(4)
    devices = simulator.load()
    stage = stage_of(devices, 0.05 / 8)
    scales = [tf.Variable(1.0) for _ in range(4)]
    stages = [lambda rows, scale=scale: tf.tanh(stage(rows * scale)) for scale in scales]
    pipe = devicemap.Pipeline(stages, [f"CPU:{k}" for k in range(4)], 8, "1f1b", loss="mse")
    x = tf.random.normal([64, 4])
    for _ in range(2):
        report = pipe.report(x, tf.zeros_like(x))
    print(report)
    report.plot(path)


def draw_scaling(path: Path) -> None:
    """Draw the speed-up against the number of devices from the recorded results, without and with a stateful op."""
    from benchmarks import records

    results = [each for each in records.read(RESULTS) if each.topic == "scaling"]
    figure, panels = new_figure(2, (11, 5.4))
    for axes, (case, title) in zip(
        panels, {"stateless": "stateless function", "stateful": "function with a stateful op"}.items()
    ):
        own = [each for each in results if each.case == case]
        counts = [each.devices for each in own]
        axes.plot(counts, counts, color="black", linestyle="--", linewidth=1.5, label="ideal")
        for way, (colour, marker, size) in STYLES.items():
            speed_ups = [each.share(way) * each.devices for each in own]
            style = {"marker": marker, "markersize": size, "markerfacecolor": "none", "markeredgewidth": 2}
            axes.plot(counts, speed_ups, color=colour, linewidth=2, label=NAMES.get(way, way), **style)
            print(f"{case}, {way}: {speed_ups[-1]:.1f} times as fast on {counts[-1]} devices")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(counts, counts)
        axes.set_yticks(counts, counts)
        axes.set(title=title, xlabel="simulated devices")
    panels[0].set_ylabel("speed-up")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def new_figure(panels: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    """A figure with panels beside each other, which share their axes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(TEXT)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    return figure, figure.subplots(1, panels, sharex=True, sharey=True)


PICTURES: dict[str, Callable[[Path], None]] = {
    "timeline": draw_timeline,
    "batch-size": draw_batch_size,
    "pipeline": draw_pipeline,
    "scaling": draw_scaling,
}


def main(folder: str, *names: str) -> None:
    """Draw a picture here, or several in processes of their own."""
    if len(names) == 1:
        PICTURES[names[0]](Path(folder) / f"{names[0]}.png")
        return
    for name in names or PICTURES:
        subprocess.run([sys.executable, "-m", "benchmarks.pictures", folder, name], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
