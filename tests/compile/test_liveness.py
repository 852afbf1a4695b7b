"""The most bytes that are alive at once, of graphs that are told in numbers."""

from __future__ import annotations

import pytest

from devicemap.compile.cost.liveness import Body, Op, needed, peak_bytes


@pytest.mark.parametrize(
    ("ops", "kept", "peak"),
    [
        ([Op((0,), ((1, 8),)), Op((1,), ((2, 4),))], (), 8 + 8),  # 0 is freed before 2 is made
        ([Op((0,), ((1, 8),), in_place=True), Op((1,), ((2, 4),))], (), 8 + 4),
        ([Op((0,), ((1, 8),), in_place=True), Op((1,), ((2, 4),))], (0,), 8 + 8 + 4),  # not over what is needed
        ([Op((0,), ((1, 8),), in_place=True), Op((0,), ((2, 8),), in_place=True), Op((1, 2), ())], (), 8 + 8),
        ([Op((0,), ((1, 0),), views=True), Op((1,), ((2, 4),)), Op((1, 2), ((3, 16),))], (), 8 + 4 + 16),
        ([Op((0,), ((1, 2),)), Op((1,), ((2, 4),)), Op((0,), ((3, 9),))], (3,), 8 + 2 + 9),  # 3 before 2: first come
        ([Op((), ((1, 5),)), Op((), ((2, 6),)), Op((0,), ())], (), 8 + 6),
        ([Op((0,), ((1, 2),)), Op((), ((2, 9),), ahead=True), Op((1, 2), ())], (), 8 + 9 + 2),  # 2 before 1
    ],
    ids=["chain", "in place", "kept", "last taker", "view", "order", "nobody takes it", "ahead"],
)
def test_of_a_graph(ops: list[Op], kept: tuple[int, ...], peak: int) -> None:
    assert peak_bytes(ops, {0: 8}, kept) == peak


def _loop(constant: bool) -> Op:
    """A step makes 3 bytes of the state (8), and the next state of them and of the other one (5)."""
    step = (Op((10,), ((12, 3),)), Op((12, 11), ((13, 8),)))
    body = Body(step, ((10, 8), (11, 5)), (13, 11), repeats=True, constant=frozenset([1] if constant else []))
    return Op((0, 1), ((2, 8),), bodies=(body,))


def test_a_loop_takes_over_what_nobody_else_needs() -> None:
    given = {0: 8, 1: 5}
    assert peak_bytes([_loop(constant=True)], given, ()) == 8 + 3 + 5
    assert peak_bytes([_loop(constant=True)], given, (0,)) == 8 + (8 + 3 + 5)  # what it began with stays
    assert peak_bytes([_loop(constant=False)], given, (1,)) == 5 + (8 + 3 + 5)  # and its own


def test_of_branches_the_larger_counts() -> None:
    def branch(size: int) -> Body:
        return Body((Op((20,), ((21, size),)),), ((20, 8),), (21,), repeats=False)

    choice = Op((0,), ((1, 2),), bodies=(branch(2), branch(30)))
    assert peak_bytes([choice], {0: 8}, ()) == 8 + 30
    assert peak_bytes([choice, Op((0, 1), ())], {0: 8}, ()) == 8 + 30


def test_what_nobody_needs_is_left_out() -> None:
    ops = [Op((0,), ((1, 8),)), Op((0,), ((2, 8),)), Op((2,), (), acts=True), Op((0,), ((3, 8),))]
    assert needed(ops, [3]) == ops[1:]
