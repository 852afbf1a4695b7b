"""Loops and branches in the sketch of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from devicemap.compile.cost.constants import LARGEST_CONSTANT, Value, shaped
from devicemap.compile.cost.ledger import Crossing
from devicemap.compile.cost.liveness import Body, Op, made_by
from devicemap.compile.cost.walk import lasting_variables

if TYPE_CHECKING:
    from devicemap.compile.cost.sketch import Sketch


def run_branches(sketch: Sketch, op: Any, taken: Sequence[Value], used: set[int]) -> Sequence[Value]:
    """An op that runs one of several graphs: the one that is known, or all, of which the largest results count."""
    names = ("else_branch", "then_branch")
    of_cases = "branches" in op.node_def.attr
    branches = [f.name for f in op.get_attr("branches")] if of_cases else [op.get_attr(name).name for name in names]
    if taken[0].known is not None:
        chosen = min(int(taken[0].known), len(branches) - 1)
        return sketch.run(sketch.graph_of(branches[chosen]), taken[1:], used)
    bodies, results = [], []
    for name in branches:
        arguments = [sketch.again(value) for value in taken[1:]]
        ops, ends, crossed = sketch.inside(sketch.graph_of(name), arguments)
        for each in crossed:
            sketch.ledger.add(replace(each, size_bytes=None))
        condition = sketch.value(taken[0].tensor, on_host=True)
        inputs = [(v.number, sketch.held(v)) for v in (condition, *arguments)]
        bodies.append(Body(tuple(ops), tuple(inputs), tuple(v.number for v in ends), repeats=False))
        results.append(ends)
    largest = [max(ends, key=sketch.held) for ends in zip(*results)]
    made = [sketch.value(v.tensor, on_host=v.on_host, listed=v.listed) for v in largest]
    return sketch.run_bodies(taken, made, [sketch.held(v) for v in largest], bodies)


def run_loop(sketch: Sketch, op: Any, taken: Sequence[Value], used: set[int]) -> Sequence[Value]:
    """A loop, of which a step at the beginning and one at the end stand for all."""
    # What a loop carries is where it runs; what is captured is there already.
    if not sketch.is_away(op, ()):
        there = [sketch.device is None and v.number not in sketch.data for v in taken]
        stays = [is_there or sketch.passes_on_host(v.tensor.dtype) for is_there, v in zip(there, taken)]
        taken = [value if stay else sketch.on_device(value) for value, stay in zip(taken, stays)]
    step, test = (sketch.graph_of(op.get_attr(name).name) for name in ("body", "cond"))
    kept = lasting_variables(used, step, test)
    taken = [v if i in kept else replace(v, on_host=True, listed=None) for i, v in enumerate(taken)]
    ends_of_step = enumerate(step.outputs)
    constant = frozenset(i for i, end in ends_of_step if i not in kept or _origin(end).name == step.inputs[i].name)
    grows = any(value.listed and not value.listed.length for i, value in enumerate(taken) if i in kept)
    steps = _steps(sketch, test, taken, step, constant) if grows else None
    counted = grows
    begun = shapes = [value.tensor.shape for value in taken]
    while True:
        arguments = _arguments(sketch, taken, constant, begun, steps)
        ops, results, crossed = sketch.inside(step, arguments, kept)
        met = [_common(shape, value.tensor.shape) for shape, value in zip(shapes, results)]
        if [str(shape) for shape in met] == [str(shape) for shape in shapes]:
            break
        shapes = met
    played = [(ops, arguments, results)]
    grown = any(b.is_fully_defined() > s.is_fully_defined() for b, s in zip(begun, shapes))
    if grown or sketch.unsized & {number for number, _ in made_by(ops)}:
        steps = _steps(sketch, test, taken, step, constant)
        if steps == 0:
            return taken
        if steps is not None:
            played, shapes = _first_and_last(sketch, step, taken, constant, kept, steps)
            ops, arguments, results = played[-1]
    _, (goes_on,), asked = sketch.inside(test, arguments)
    asked = [*asked, *([] if goes_on.on_host else [Crossing(op.type, False, 1)])]
    if (crossed or asked) and not counted:
        steps = _steps(sketch, test, taken, step, constant)
    for times, each_time in ((steps, crossed), (None if steps is None else steps + 1, asked)):
        for each in each_time:
            size = None if times is None or each.size_bytes is None else times * each.size_bytes
            sketch.ledger.add(replace(each, size_bytes=size))
    ahead = sketch.value(None)
    ahead_bytes = 0 if grows else _ahead_bytes(sketch, ops, arguments, results, constant)
    if ahead_bytes:
        steps = _steps(sketch, test, taken, step, constant)
        most = op.get_attr("parallel_iterations")
        ahead_bytes *= (most if steps is None else min(steps, most)) - 1
    shrinks = [end.listed is not None and end.listed.shrinks for end in results]
    bodies = []
    for last, (ops, arguments, results) in itertools.product((True, False) if any(shrinks) else (True,), played):
        sizes = [
            sketch.held(v) if i in constant or v.listed is None else _elements(sketch, v, shrinks[i], last)
            for i, v in enumerate(arguments)
        ]
        inputs = ((v.number, size) for v, size in zip((*arguments, ahead), (*sizes, ahead_bytes)))
        bodies.append(
            Body(tuple(ops), tuple(inputs), tuple(v.number for v in (*results, ahead)), repeats=True, constant=constant)
        )
    made = [
        sketch.value(
            v.tensor if v.listed else shaped(sketch.unknown(v.tensor), shape), on_host=v.on_host, listed=v.listed
        )
        for v, shape in zip(results, shapes)
    ]
    sketch.run_bodies(taken, [v for i, v in enumerate(made) if i not in constant], None, bodies)
    return [taken[i] if i in constant else value for i, value in enumerate(made)]


def _ahead_bytes(
    sketch: Sketch,
    ops: Sequence[Op],
    arguments: Sequence[Value],
    results: Sequence[Value],
    constant: frozenset[int],
) -> int:
    """What each step makes that the next ones need not wait for: TensorFlow may do so for many steps at once.

    A variable of the loop takes as many ops one after another in each step as lie between it and its next value, or as one
    takes that it depends on. What is made of quick ones alone waits for what the slow ones take it for.
    """
    carried = [i for i, v in enumerate(arguments) if i not in constant and not v.on_host]
    depths: dict[int, dict[int, int]] = {arguments[i].number: {i: 1} for i in carried}
    for op in ops:
        found: dict[int, int] = {}
        for i, depth in (each for value in op.takes for each in depths.get(value, {}).items()):
            found[i] = max(found.get(i, 0), depth + 1)
        depths |= dict.fromkeys((value for value, _ in op.makes), found)
    before = {i: depths.get(results[i].number, {}) for i in carried}
    periods = {i: before[i].get(i, 1) for i in carried}
    for _ in carried:
        periods = {i: max((periods[j] for j in (i, *before[i])), default=1) for i in carried}
    ahead: dict[int, float] = {}
    sizes = {arguments[i].number: _renewed_bytes(sketch, results[i]) for i in carried} | dict(made_by(ops))
    for op in ops:
        period = max((periods[i] for value in op.takes for i in depths.get(value, {})), default=0)
        for value in () if op.views or not period else op.takes:
            own = max((periods[i] for i in depths.get(value, {})), default=0)
            ahead[value] = max(ahead.get(value, 0.0), sizes.get(value, 0) * (1 - own / period))
    return round(sum(ahead.values()))


def _renewed_bytes(sketch: Sketch, value: Value) -> int:
    """What a variable of a loop allocates in each step: of a list, an element, unless it is emptied."""
    if value.listed is None:
        return sketch.bytes_of(value)
    return 0 if value.listed.shrinks else value.listed.element_bytes


def _elements(sketch: Sketch, value: Value, shrinks: bool, last: bool) -> int:
    """The bytes of a list at the beginning of the first or the last step of a loop that fills or empties it."""
    listed, whole = value.listed, sketch.held(value)
    if listed is None or listed.length is None or value.on_host:
        return 0
    if shrinks:
        return listed.element_bytes if last else whole
    return whole - listed.element_bytes if last else 0


def _steps(sketch: Sketch, test: Any, taken: Sequence[Value], step: Any, constant: frozenset[int]) -> int | None:
    """How often a loop runs, where counters alone tell."""
    by = _increments(step, taken)

    def goes_on_after(steps: int) -> Any:
        counted = {i: taken[i].known + steps * more for i, more in by.items()}
        known = [v.known if i in constant else counted.get(i) for i, v in enumerate(taken)]
        _, (goes_on,), _ = sketch.inside(test, [replace(value, known=k) for value, k in zip(taken, known)])
        return goes_on.known

    if goes_on_after(0) is not None and not goes_on_after(0):
        return 0
    first, last = 0, 1
    while goes_on_after(last):
        first, last = last, 2 * last
        if last > LARGEST_CONSTANT:
            return None
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if goes_on_after(middle) else (first, middle)
    return last if goes_on_after(first) and goes_on_after(last) is not None else None


def _arguments(
    sketch: Sketch, taken: Sequence[Value], constant: Collection[int], shapes: Sequence[Any], steps: int | None
) -> list[Value]:
    """What a step begins with, whichever it is."""
    return [
        sketch.again(v)
        if i in constant
        else _carried(sketch, v, sketch.unknown(tf.TensorSpec(shape, v.tensor.dtype)), steps)
        for i, (v, shape) in enumerate(zip(taken, shapes))
    ]


def _carried(sketch: Sketch, value: Value, tensor: Any, steps: int | None) -> Value:
    """What a step begins with instead of a value that a loop begins with."""
    listed = value.listed
    if listed is not None:
        listed = replace(listed, length=listed.length or steps)
    return sketch.again(replace(value, tensor=tensor, known=None, listed=listed))


def _first_and_last(
    sketch: Sketch, step: Any, taken: Sequence[Value], constant: Collection[int], kept: Collection[int], steps: int
) -> tuple[list[tuple[list[Op], list[Value], list[Value]]], list[Any]]:
    """The first and the last step of a loop whose counters tell shapes, or in which what is joined grows: their ops, what
    they begin and what they end with; and the shapes after the last one."""
    counted = _increments(step, taken)
    shapes = [value.tensor.shape for value in taken]
    played, growth = [], [0] * len(taken)
    for done in (0, steps - 1):
        begun = [_grown(shape, more, done) for shape, more in zip(shapes, growth)]
        arguments = _arguments(sketch, taken, constant, begun, steps)
        for i, more in counted.items():  # for shapes: what is computed from it is not the same in each step
            if i not in constant:
                now = sketch.constant(taken[i].known + done * more)
                arguments[i] = _carried(sketch, taken[i], now, steps)
        ops, results, _ = sketch.inside(step, arguments, kept)
        growth = growth if done else [_growth(shape, value.tensor.shape) for shape, value in zip(shapes, results)]
        played.append((ops, arguments, results))
    return played, [_grown(shape, more, steps) for shape, more in zip(shapes, growth)]


def _growth(before: Any, after: Any) -> int:
    """How many rows a step adds."""
    known = before.rank and after.rank and None not in (before[0], after[0])
    return after[0] - before[0] if known else 0


def _grown(shape: Any, more: int, steps: int) -> Any:
    """A shape with so many more rows in each of the steps before it."""
    return tf.TensorShape([shape[0] + steps * more]).concatenate(shape[1:]) if more else shape


def _common(a: Any, b: Any) -> Any:
    return (
        a
        if a.rank is None
        else tf.TensorShape(None)
        if b.rank != a.rank
        else tf.TensorShape([x if x == y else None for x, y in zip(a.as_list(), b.as_list())])
    )


def _origin(tensor: Any) -> Any:
    """What a tensor is a copy of."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _increments(step: Any, taken: Sequence[Value]) -> dict[int, Any]:
    """What each step adds to the counters of a loop, by their position."""
    found = {i: _increment(step, i, taken) for i, value in enumerate(taken) if value.known is not None}
    return {i: more for i, more in found.items() if more is not None}


def _increment(step: Any, i: int, taken: Sequence[Value]) -> Any:
    """What each step of a loop adds to a variable; `None` where that is not all it does with it, or differs."""
    end = _origin(step.outputs[i]).op
    if end.type not in ("Add", "AddV2"):
        return None
    one, other = map(_origin, end.inputs)
    if one.name != step.inputs[i].name:
        return None
    places = [k for k, tensor in enumerate(step.inputs) if tensor.name == other.name == _origin(step.outputs[k]).name]
    return taken[places[0]].known if places else tf.get_static_value(other)
