"""What verifying a function found out, as values: to print, to save, to decide on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.tell.render import Result, page, table
from devicemap.tell.verify.comparison import Difference


@dataclass(frozen=True)
class Comparison:
    """Two ways of running the function on the same rows, compared."""

    _derived = ("same",)

    question: str
    """What it asks, one of `diagnosis.CAUSES`."""

    ways: tuple[str, str]
    """The two ways, in words."""

    differences: tuple[Difference, ...]
    """The outputs that differ at all."""

    error: str | None = None
    """What the first way failed with, while the other one worked; then nothing was compared."""

    @property
    def same(self) -> bool:
        """Whether all outputs are the same, to rounding."""
        return self.error is None and not any(difference.fault for difference in self.differences)

    @property
    def largest(self) -> Difference | None:
        """The output that differs most; `None` where all are equal to the last bit."""
        return max(self.differences, key=lambda difference: difference.weight, default=None)

    def __str__(self) -> str:
        if self.error is not None:
            return f"failed: {self.error}"
        if self.largest is None:
            return "equal"
        return f"{'equal to rounding' if self.same else 'DIFFERENT'}: {self.largest}"


@dataclass(frozen=True)
class Finding:
    """Something that was found out about a function."""

    kind: str
    """What is the matter: `"random"`, `"state"`, `"python"`, `"coupled"`, `"order"`, `"devices"`, `"graph"`, `"eager"`,
    `"rounding"` or `"writes"`."""

    output: str | None
    """The output that it is about, as `the result['x']`; `None` for the function as a whole."""

    difference: str
    """What differs, where and by how much; for `"writes"` and failures what was seen."""

    meaning: str
    """What it means, and what to do about it."""

    changes_results: bool
    """Whether results differ by more than rounding."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.difference}. {self.meaning}"


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """What `DeviceMap.verify` found out. `print(verification)` shows all of it."""

    _least_width = 160
    _derived = ("ok",)

    name: str
    """Name of the function."""

    rows: int
    """How many rows it was run on."""

    devices: tuple[str, ...]
    """Full names of the devices of the map."""

    findings: tuple[Finding, ...]
    """What was found; what changes results comes first."""

    comparisons: tuple[Comparison, ...]
    """Which ways were compared, and how far they are apart."""

    @property
    def ok(self) -> bool:
        """Whether all ways gave the same results, to rounding. A function that only writes a variable is ok."""
        return not any(finding.changes_results for finding in self.findings)

    def __bool__(self) -> bool:
        raise TypeError("a Verification is neither true nor false: ask for verification.ok")

    def __rich__(self) -> Any:
        answer = "the same results in all ways, to rounding" if self.ok else "NOT the same results in all ways"
        devices = ", ".join(map(short_name, self.devices))
        title = f"{self.name}: {answer}; {self.rows} row(s) on {devices}"
        ways = [{"ways": " against ".join(each.ways), "results": str(each)} for each in self.comparisons]
        notes = [f"* {finding}" for finding in self.findings]
        few = ["One row does not tell whether rows depend on each other: verify more."] if self.rows == 1 else []
        return page(title, table(ways, {"results"}), notes=[*notes, *few])
