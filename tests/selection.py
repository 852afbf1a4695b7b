"""Which combinations of a test's parameters run in CI: a cover that depends on nothing but their names. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import combinations


def cover(cells: Mapping[str, Mapping[str, object]], limit: int | None = None) -> list[str]:
    """Select cells of a cross of parameters.

    Each value of the longest parameter, usually the cases, is selected once. The device sets and the other parameters take the
    values whose pairs were selected least. Then cells are added until all pairs of values of the other parameters are selected.
    A test without other parameters runs on one device set.

    Args:
        cells: for the name of each cell, the value of each parameter.
        limit: the most cells.

    Returns:
        Names of cells. They do not depend on the order of `cells`, nor on other tests.

    Examples:
        >>> cells = {f"{n}{devices}": {"case": n, "devices": devices} for n in range(4) for devices in "ab"}
        >>> chosen = [cells[name] for name in cover(cells)]
        >>> sorted(cell["case"] for cell in chosen), sorted(cell["devices"] for cell in chosen)
        ([0, 1, 2, 3], ['a', 'a', 'b', 'b'])
    """
    order = sorted(cells, key=lambda name: sha256(name.encode()).digest())
    values = {key: {cell[key] for cell in cells.values()} for key in sorted(cells[order[0]])}
    cases = max((key for key in values if key != "devices"), key=lambda key: len(values[key]), default=None)
    if cases is None:
        return order[:1]
    uses: Counter[object] = Counter()
    chosen: list[str] = []

    def pairs(name: str, *left_out: str) -> list[object]:
        known = [(key, cells[name][key]) for key in values if key not in left_out]
        return [*known, *combinations(known, 2)]

    def take(names: Sequence[str]) -> None:
        best = min(names, key=lambda name: sum(uses[pair] for pair in pairs(name)))  # the first of equal ones
        uses.update(pairs(best))
        chosen.append(best)

    for case in dict.fromkeys(cells[name][cases] for name in order):
        take([name for name in order if cells[name][cases] == case])
    while uncovered := [name for name in order if any(not uses[pair] for pair in pairs(name, cases, "devices"))]:
        take(uncovered)
    return chosen[:limit]
