"""What was measured, as values: read from pytest-benchmark's JSON, and held against the targets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

OURS = "devicemap"
"""How the names of our own ways begin; all others are peers."""


@dataclass(frozen=True)
class Record:
    """One case on one number of devices: ways that took turns."""

    topic: str
    """The table it belongs to."""

    case: str
    """What was done."""

    devices: int
    """On how many devices."""

    seconds: Mapping[str, Sequence[float]]
    """Of each way, per call, one number per turn."""

    first_seconds: Mapping[str, float]
    """Of each way, the very first call, which sets up and traces."""

    machine: str = ""
    """Machine and versions."""

    measured: str = ""
    """Date and commit."""

    ideal_seconds: float | None = None
    """How long the job takes at least, where that is known."""

    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By what is demanded (`"least share"`), the value for each way."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else was written down."""

    def seconds_of(self, way: str) -> float:
        """The median."""
        return median(self.seconds[way])

    def share(self, way: str) -> float:
        """Ideal time by time taken."""
        assert self.ideal_seconds is not None
        return self.ideal_seconds / self.seconds_of(way)

    def best_peer(self) -> str | None:
        """The fastest way that is not ours."""
        peers = [way for way in self.seconds if not way.startswith(OURS)]
        return min(peers, key=self.seconds_of, default=None)

    def ratio(self, way: str) -> float | None:
        """Time by that of the best peer."""
        peer = self.best_peer()
        return None if peer is None else self.seconds_of(way) / self.seconds_of(peer)


@dataclass(frozen=True)
class Verdict:
    """A target, and what was reached."""

    record: Record
    way: str
    demand: str
    """`"least share"`, `"most seconds"`, `"most megabytes"`, `"most ratio"`, or `"most ratio to base"`."""

    target: float
    reached: float

    @property
    def met(self) -> bool:
        """Whether the target is reached, before any rounding."""
        return self.reached >= self.target if self.demand.startswith("least") else self.reached <= self.target


def read(folder: Path) -> list[Record]:
    """All records of a folder of pytest-benchmark's JSON files, by number of devices."""
    records = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        machine, commit = content["machine_info"]["description"], content["commit_info"]
        measured = f"{content['datetime'][:10]} at commit {str(commit.get('id'))[:9]}"
        measured += " with local changes" if commit.get("dirty") else ""
        for benchmark in content["benchmarks"]:
            facts = dict(benchmark["extra_info"])
            known = {name: facts.pop(name) for name in _KNOWN if name in facts}
            record = Record(machine=machine, measured=measured, facts=facts, **known)
            if "steady_seconds" in facts:  # targets are for the time after the set-up of each run
                records.append(replace(record, targets={}))
                case = f"{record.case}, from the first block to the last"
                record = replace(record, case=case, seconds=facts["steady_seconds"])
            records.append(record)
    return sorted(records, key=lambda record: record.devices)  # the cases of a file stay in their order


def judge(records: Iterable[Record]) -> Iterator[Verdict]:
    """Every target of every record."""
    for record in records:
        for demand, ways in record.targets.items():
            for way, target in ways.items():
                yield Verdict(record, way, demand, target, _reached(record, way, demand))


_KNOWN = ("topic", "case", "devices", "seconds", "first_seconds", "ideal_seconds", "targets")


def _reached(record: Record, way: str, demand: str) -> float:
    if demand == "least share":
        return record.share(way)
    if demand == "most ratio":
        ratio = record.ratio(way)
        assert ratio is not None
        return ratio
    if demand == "most ratio to base":
        return record.seconds_of(way) / record.seconds_of(record.facts["base"])
    if demand == "most seconds":
        return record.seconds_of(way)
    assert demand == "most megabytes", demand
    return float(record.facts["rise_megabytes"][way])
