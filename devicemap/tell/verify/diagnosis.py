"""What it means that two ways of running a function differ: comparisons -> findings. Pure: no tensors.

Causes come before their consequences: an output that changes from run to run differs in every comparison, and one that
depends on the other rows differs over devices too. Each output is told its first cause only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from devicemap.tell.verify.findings import Comparison, Finding

CAUSES = ("graph again", "eager again", "coupled", "order", "devices", "eager")
"""What a comparison asks, the deepest cause first."""

_ROUNDING = (
    "This is rounding. Sums are taken in another order for another number of rows, in a graph or on another device; do not "
    "count on the same bits everywhere"
)


@dataclass(frozen=True)
class Facts:
    """What is known of a function from its graph."""

    batched: bool
    """Whether it takes a batch."""

    random_ops: tuple[str, ...]
    """Types of its random ops that keep a state."""

    writes: tuple[str, ...]
    """Names of the captured variables and other resources that it writes."""

    ordered: bool
    """Whether it writes them in a way that depends on order."""

    python_ops: tuple[str, ...]
    """Types of its ops that run Python."""


def diagnose(comparisons: Sequence[Comparison], outputs: Sequence[str], facts: Facts) -> tuple[Finding, ...]:
    """Findings about each of the `outputs`, which are paths; those that change results come first."""
    ordered = sorted(comparisons, key=lambda comparison: CAUSES.index(comparison.question))
    failed = {comparison.question: comparison for comparison in reversed(ordered) if comparison.error is not None}
    faults = [_failure(comparison, facts) for comparison in failed.values()]
    rounded = []
    unlisted = {d.output for c in ordered for d in c.differences} - set(outputs)  # results of another structure
    for output in (*outputs, *sorted(unlisted)):
        seen = [(c, d) for c in ordered for d in c.differences if d.output == output]
        cause = next(((c, d) for c, d in seen if d.fault), None)
        comparison, difference = cause or max(seen, key=lambda pair: pair[1].weight, default=(None, None))
        if comparison is None:
            continue
        found = f"{difference}: {' against '.join(comparison.ways)}"
        if cause is None:
            rounded.append(Finding("rounding", output, found, _ROUNDING, False))
            continue
        kind, meaning = _meaning(comparison.question, facts)
        if comparison.question.endswith(" again"):
            meaning += ". Until then, the other comparisons of this output tell nothing"
        faults.append(Finding(kind, output, found, meaning, True))
    return (*faults, *_writes(facts), *rounded)


def _meaning(question: str, facts: Facts) -> tuple[str, str]:
    if question == "coupled" and not facts.batched:
        return "coupled", (
            "A row's result depends on the rows that are mapped together with it, though fn takes one sample. "
            "vectorize=False maps row by row"
        )
    if question != "graph again":
        return _MEANINGS[question]
    if facts.random_ops:  # what changes from run to run on the same rows
        return "random", (
            f"fn draws different random numbers each time ({', '.join(facts.random_ops)}). For the same results "
            "on any devices and after a resumption, use the option seed= and tf.random.stateless_* ops"
        )
    if facts.writes:
        return "state", (
            f"The result depends on state that fn writes ({', '.join(facts.writes)}), so on the calls before and on the "
            "order of rows. Return what should be kept, and update the variable after the map"
        )
    if facts.python_ops:
        return "python", (
            f"fn runs Python in its graph ({', '.join(facts.python_ops)}), which gives something else each time. Draw its "
            "random numbers from seed=, and pass what changes as data"
        )
    return "state", (
        "fn gives something else each time: it reads state outside of it, the time, or is not deterministic"
    )


_MEANINGS = {
    "eager again": (
        "python",
        "Python code in fn gives something else each time: a Python counter, Python's or NumPy's random numbers, the time. "
        "A graph keeps what it was while tracing, the same for all rows: pass it as data, use a tf.Variable, or seed=",
    ),
    "coupled": (
        "coupled",
        "A row's result depends on the other rows of its batch, as with a mean over the batch or batch normalisation "
        "in training mode, so it changes with the number of devices and with batch_size. Use statistics that are "
        "fixed beforehand (training=False), or compute them in a first pass and close over them",
    ),
    "order": (
        "order",
        "A row's result depends on where in the batch it stands, or on which rows came before it. Rows go to devices "
        "in no fixed order: make the result a function of the row alone; pass its index as data if it is needed",
    ),
    "devices": (
        "devices",
        "Devices, or calls on fewer rows, compute something else than one device on all rows. A result may depend on "
        "the number of rows or on the device; kernels of different devices may round differently",
    ),
    "eager": (
        "graph",
        "In a graph, Python code runs once, while tracing: what it reads then (a Python variable, the time, "
        "tf.executing_eagerly()) stays as it was. DeviceMap runs graphs. Pass what changes as data or in a tf.Variable",
    ),
}
"""What differences mean, by what was asked: a kind, and words."""


def _failure(comparison: Comparison, facts: Facts) -> Finding:
    question, (way, other) = comparison.question, comparison.ways
    found = f"{way} failed with {comparison.error}"
    if question in ("coupled", "order"):
        meaning = f"fn works on {other}, but has to take any number of rows in any order: a device may get a single one"
        return Finding(question, None, found, meaning, True)
    if question == "eager":
        meaning = "DeviceMap runs graphs, where fn works. It could not be compared with eager code"
        return Finding("eager", None, found, meaning, False)
    return Finding("state", None, found, _meaning(question, facts)[1], True)


def _writes(facts: Facts) -> list[Finding]:
    how = (
        "in a way that depends on order, so that shards run one after another, in the order of rows: several devices gain "
        "nothing"
        if facts.ordered
        else "in a way that any order leaves the same, so that devices stay parallel; what they read of it meanwhile is not "
        "defined"
    )
    meaning = f"It is written {how}. Verifying has written it as well, in each of its runs"
    return [Finding("writes", None, f"fn writes {', '.join(facts.writes)}", meaning, False)] if facts.writes else []
