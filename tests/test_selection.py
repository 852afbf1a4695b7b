"""The cover of parameters that CI runs."""

from __future__ import annotations

from itertools import product

from selection import cover

CELLS = {
    f"test[{devices}-{case}-{way}]": {"devices": devices, "case": case, "way": way}
    for devices, case, way in product((1, 2, 3), range(10), "abcd")
}


def test_all_pairs_of_the_shorter_parameters_are_selected() -> None:
    """Parameters whose lengths share factors are not locked together."""
    cells = {str(cell): dict(zip(("case", "tape", "way"), cell)) for cell in product(range(8), range(4), range(4))}
    chosen = [cells[name] for name in cover(cells)]
    assert {(cell["tape"], cell["way"]) for cell in chosen} == {*product(range(4), range(4))}
    assert len(chosen) <= 20


def test_limits_the_order_of_cells_and_tests_with_device_sets_alone() -> None:
    assert cover(dict(reversed(CELLS.items())), 3) == cover(CELLS)[:3]
    assert len(cover({f"test[{n}]": {"devices": n} for n in range(4)})) == 1
