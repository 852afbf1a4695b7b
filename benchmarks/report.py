"""Write the results as tables in Markdown: `python -m benchmarks.report`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.records import OURS, Record, Verdict, judge, read

RESULTS = Path(__file__).parent / "results"

SPREAD = "Medians, ± half the distance between the quartiles in percent of them"

SHARE_TEXT = (
    f"Share of the ideal time (total work by total speed) on simulated accelerators. {SPREAD}; the number of times the best "
    "peer takes, in brackets: below 1, devicemap is faster. The ways took turns in one run."
)

TIME_TEXT = f"{SPREAD}; the number of times the best peer takes, in brackets: below 1, devicemap is faster."

SENT_TEXT = (
    "What is sent between devices is counted while a call runs, in loops for each step. Between CPU devices it is handed over "
    "without a copy: there, bytes cost no time, and only waiting for them does."
)

CAPTURED_TEXT = (
    "The variables live on the first device, and the blocks read them there. A loop in a block fetches its rows, too, in "
    "each step, unless the block begins with a `tf.identity` of them (rows copied first); where the function lets its "
    "author do so, the same for a variable (rows and table copied first) is what devicemap does by itself. What is sent in "
    "batches is of the whole job; chunks that happen to go to the first device do not travel."
)

HOSTS_TEXT = (
    "Simulated devices of another process on the same machine, over loopback: a network adds what it takes for the same "
    "bytes. A chunk takes as long on the devices of both processes; what is more is what TensorFlow's servers cost."
)

UNTUNED_TEXT = "Datasets have no autotuning, as the end of an iteration would wait for its thread."

RAY_TEXT = (
    "One actor, on a Ray cluster of this machine alone. Each run starts a new actor, which takes seconds, most of them for "
    "importing TensorFlow."
)

TOPICS = {
    "scaling": ("Eager against graph", SHARE_TEXT + " Each number of devices has as much more work."),
    "balance": ("Share of the ideal time", SHARE_TEXT),
    "batch_size": ("Time against batch size", SHARE_TEXT + " A row takes 5 ms of a device, and a call 2 ms besides."),
    "streaming": ("Streams", SHARE_TEXT + " " + UNTUNED_TEXT),
    "chunk_cost": ("Cost of small chunks", TIME_TEXT + " " + UNTUNED_TEXT),
    "memory": ("Memory of a stream", TIME_TEXT),
    "reduce": ("Reductions", TIME_TEXT),
    "store": ("Results on disk", TIME_TEXT),
    "call_cost": ("Cost of a call on a few rows", TIME_TEXT),
    "first_result": (
        "Time to the first result",
        TIME_TEXT + " Each turn is a program of its own, timed from when it is ready, or makes a further map in one.",
    ),
    "gathering": ("Gathering", TIME_TEXT + " " + SENT_TEXT),
    "captured": ("Captured variables", TIME_TEXT + " " + CAPTURED_TEXT + " " + SENT_TEXT),
    "real_functions": (
        "Real functions",
        TIME_TEXT
        + " All rows in one call. The first call of tf.vectorized_map comes after its trace, which is not counted.",
    ),
    "training": ("Training", TIME_TEXT + " The first call is the first epoch, which traces."),
    "pipeline": ("Pipelines", SHARE_TEXT + " The ideal is (M + K - 1) times as long as a stage has a microbatch."),
    "hosts": ("Other hosts", TIME_TEXT + " " + HOSTS_TEXT),
    "ray": ("Ray Data", TIME_TEXT + " " + RAY_TEXT),
    "balance_gpus": (
        "Share of the ideal time on GPUs in software",
        SHARE_TEXT + " They are [GPUs in software](../softgpu/README.md), whose kernels take the time of their rows.",
    ),
    "pipeline_gpus": (
        "Pipelines on GPUs in software",
        SHARE_TEXT
        + " A stage computes as long as it sends. The ideal is that of the schedule, from when the host sends rows, if"
        + " transfers overlap computation.",
    ),
    "gpu": ("GPUs", TIME_TEXT),
}
"""Title and text of each page, in the order of the index."""


def main() -> None:
    """Write the tables, and print the targets that were missed."""
    for verdict in write(RESULTS):
        if not verdict.met:
            print(f"missed: {verdict.record.case}, {verdict.record.devices} devices, {_demand(verdict)}")


def write(folder: Path) -> list[Verdict]:
    """Write the tables of what is in `raw/`; returns the targets with what was reached."""
    records = read(folder / "raw")
    pages = {topic: [record for record in records if record.topic == topic] for topic in TOPICS}
    pages = {topic: page for topic, page in pages.items() if page}
    for topic, page in pages.items():
        (folder / f"{topic}.md").write_text(write_page(topic, page))
    verdicts = list(judge(records))
    (folder / "README.md").write_text(write_index(list(pages), verdicts, records))
    return verdicts


def write_page(topic: str, records: Sequence[Record]) -> str:
    """One topic: tables, and what the first calls took."""
    title, text = TOPICS[topic]
    turns = max(len(seconds) for record in records for seconds in record.seconds.values())
    parts = [
        f"# {title}",
        f"{_machines(records)}. {_measured(records)} Turns of each way: {turns}, fewer where one takes long. {text}",
        table(records, _share_cell if all(record.ideal_seconds is not None for record in records) else _time_cell),
    ]
    if topic in ("scaling", "balance", "streaming", "call_cost", "real_functions", "training", "gpu"):
        parts += ["## Seconds of the first call, with set-up and tracing", table(records, _first_cell)]
    if any("traffic" in record.facts for record in records):
        parts += ["## Sent between devices in a call", table(records, _traffic_cell)]
    if any("rise_megabytes" in record.facts for record in records):
        parts += ["## How far the peak of the memory is above the start", table(records, _rise_cell)]
    return "\n\n".join(parts) + "\n"


def write_index(topics: Sequence[str], verdicts: Sequence[Verdict], records: Sequence[Record]) -> str:
    """The pages, and the targets with what was reached."""
    dates = {topic: _measured([record for record in records if record.topic == topic]) for topic in topics}
    links = "\n".join(f"- [{TOPICS[topic][0]}]({topic}.md). {dates[topic]}" for topic in topics)
    rows = [
        [v.record.topic, v.record.case, v.record.devices, v.way, _demand(v), "yes" if v.met else "**no**"]
        for v in verdicts
    ]
    head = ["topic", "case", "devices", "way", "reached, target", "met"]
    return (
        f"# Results\n\n{_machines(records)}. Written by `make bench`; `raw/` holds the output of pytest-benchmark. "
        "Results of an older commit describe the code of that commit.\n\n"
        f"{links}\n\n## Targets\n\nA ratio is to the time of the fastest other way. A ratio to base is to the time of the "
        f"plain way of its topic, such as one graph for each batch.\n\n{_markdown(head, rows)}\n"
    )


def table(records: Sequence[Record], cell: Callable[[Record, str], str]) -> str:
    """A row for each case and number of devices, a column for each way."""
    ways = dict.fromkeys(way for record in records for way in record.seconds)
    ordered = sorted(ways, key=lambda way: not way.startswith(OURS))  # ours first
    rows = [[r.case, r.devices, *(cell(r, way) if way in r.seconds else "" for way in ordered)] for r in records]
    return _markdown(["case", "devices", *ordered], rows)


def _share_cell(record: Record, way: str) -> str:
    return f"{record.share(way):.3f} ± {_spread(record.seconds[way])}{_ratio(record, way)}"


def _time_cell(record: Record, way: str) -> str:
    return f"{_duration(record.seconds_of(way))} ± {_spread(record.seconds[way])}{_ratio(record, way)}"


def _first_cell(record: Record, way: str) -> str:
    return f"{record.first_seconds[way]:.2f}" if way in record.first_seconds else ""


def _traffic_cell(record: Record, way: str) -> str:
    sent = record.facts["traffic"][way]
    lists = f", {sent['lists']} whole lists" if sent["lists"] else ""
    return f"{sent['bytes'] / 1000:.0f} kB, {sent['tensors']} tensors{lists}"


def _rise_cell(record: Record, way: str) -> str:
    return f"{record.facts['rise_megabytes'][way]:.0f} MB"


def _ratio(record: Record, way: str) -> str:
    ratio = record.ratio(way) if way.startswith(OURS) else None
    return "" if ratio is None else f" ({ratio:.2f})"


def _spread(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "?"
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{50 * (high - low) / middle:.0f}%"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def _demand(verdict: Verdict) -> str:
    digits = 0 if verdict.demand == "most megabytes" else 3
    return f"{verdict.way}: {verdict.reached:.{digits}f}, {verdict.demand} {verdict.target:g}"


def _machines(records: Sequence[Record]) -> str:
    return "; ".join(dict.fromkeys(record.machine for record in records))


def _measured(records: Sequence[Record]) -> str:
    return f"Measured {', '.join(dict.fromkeys(record.measured for record in records))}."


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    main()
