"""How many bytes are alive at most while a graph of ops runs: numbers in, a number out. No tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Body:
    """A graph of ops that an op runs: a branch, or a step of a loop."""

    ops: tuple[Op, ...]
    """Its ops, each after those that it takes from."""

    arguments: tuple[tuple[int, int], ...]
    """The values that stand for what the op takes, one for each, with their bytes in the last step."""

    results: tuple[int, ...]
    """The values that it ends with."""

    repeats: bool
    """Whether it is the step of a loop: what it ends with is what the next one begins with."""

    constant: frozenset[int] = frozenset()
    """Of a loop: those of the arguments, by position, that are the same in each step."""


@dataclass(frozen=True)
class Op:
    """One op."""

    takes: tuple[int, ...]
    """The values that it needs."""

    makes: tuple[tuple[int, int], ...]
    """The values that it gives, with the bytes that it allocates for each."""

    views: bool = False
    """Whether what it gives lies, besides, where what it takes lies: a reshaped tensor, a list of tensors."""

    in_place: bool = False
    """Whether it may write what it gives over something of the same size that nobody needs after it."""

    acts: bool = False
    """Whether it runs although nobody takes what it gives."""

    bodies: tuple[Body, ...] = ()
    """What it runs, one of them or one after another."""

    after: tuple[int, ...] = ()
    """Values that have to be there before it runs, besides those that it takes."""

    ahead: bool = False
    """Whether it runs before all others that could run, as nobody knows how far devices are that run at the same time."""


def needed(ops: Sequence[Op], results: Collection[int]) -> list[Op]:
    """The ops that some results take, and those that act, with what these take; ops come after those that they take from."""
    wanted = {*results}
    found = []
    for op in reversed(ops):
        if op.acts or any(value in wanted for value, _ in op.makes):
            wanted.update(op.takes)
            found.append(op)
    return found[::-1]


def made_by(ops: Iterable[Op]) -> Iterator[tuple[int, int]]:
    """What ops give, and those that they run."""
    for op in ops:
        yield from op.makes
        for body in op.bodies:
            yield from (*body.arguments, *made_by(body.ops))


def peak_bytes(ops: Sequence[Op], given: Mapping[int, int], kept: Collection[int], lent: Collection[int] = ()) -> int:
    """The most bytes that are alive at once.

    As TensorFlow's executor does it: ops run in the order in which what they take is there, a tensor is freed when the last
    op that takes it has run, and elementwise ops write over what would be freed.

    Args:
        ops: each after those that it takes from.
        given: the values that are there at the beginning, and their bytes.
        kept: the values that are needed after the end.
        lent: of the given values those that the caller has in its own count, and needs after the end.

    >>> chain = [Op((0,), ((1, 8),)), Op((1,), ((2, 4),))]
    >>> peak_bytes(chain, {0: 8}, [2])  # 0 and 1, then 1 and 2
    16
    """
    takers = Counter([*kept, *lent, *(value for op in ops for value in {*op.takes})])
    sizes = {value: 0 if value in lent else size for value, size in given.items()}  # of what each value allocates
    places = {value: frozenset([value]) for value in given}  # where each value lies: in what these values allocate
    needed = Counter({value: takers[value] for value in given})  # how often what a value allocates is yet to be taken
    live = sum(size for value, size in sizes.items() if needed[value])
    peak = sum(sizes.values())
    for op in _in_order(ops, given):
        lies = frozenset().union(*(places[value] for value in op.takes))
        for value in {*op.takes}:
            needed.subtract(places[value])
        freed = {place for place in lies if not needed[place]}
        for body in op.bodies:
            peak = max(peak, live + _of_body(body, op.takes, places, sizes, freed))
        if op.bodies:  # what they end with takes the place of what they began with
            live -= sum(sizes[place] for place in freed)
            freed = set()
        for value, size in op.makes:
            over = next((place for place in freed if op.in_place and sizes[place] == size), None)
            if over is not None:
                freed.remove(over)
                live -= size
            sizes[value], places[value] = size, (lies if op.views else frozenset()) | {value}
            live += size
            for place in places[value]:
                needed[place] += takers[value]
        peak = max(peak, live)
        ended = {*freed, *(value for value, _ in op.makes)}
        live -= sum(sizes[place] for place in ended if not needed[place])
    return peak


def _of_body(
    body: Body,
    takes: Sequence[int],
    places: Mapping[int, frozenset[int]],
    sizes: Mapping[int, int],
    freed: Collection[int],
) -> int:
    """What the peak of a body is above what is alive when the op that runs it begins."""
    stays = frozenset().union(*(places[takes[i]] for i in body.constant)) - {*()}
    handed = [i for i, value in enumerate(takes) if places[value] <= {*freed} - stays]
    owned = frozenset().union(*(places[takes[i]] for i in handed))
    lent = body.constant if body.repeats else {*range(len(takes))} - {*handed}
    names = [value for value, _ in body.arguments]
    inner = peak_bytes(body.ops, dict(body.arguments), body.results, [names[i] for i in lent])
    return inner - sum(sizes[place] for place in owned)


def _in_order(ops: Sequence[Op], given: Collection[int]) -> list[Op]:
    """As one thread runs them: first those that wait for nothing, then what they make ready, first come, first served; but
    always those first that may run ahead."""
    made = {value for op in ops for value, _ in op.makes}
    missing = [{*op.takes, *(value for value in op.after if value in made)} - {*given} for op in ops]
    waiting: dict[int, list[int]] = {}
    for i, values in enumerate(missing):
        for value in values:
            waiting.setdefault(value, []).append(i)
    ready: dict[bool, deque[int]] = {ahead: deque() for ahead in (True, False)}
    for i, values in enumerate(missing):
        if not values:
            ready[ops[i].ahead].append(i)
    ordered = []
    while any(ready.values()):
        ordered.append(ops[(ready[True] or ready[False]).popleft()])
        for value, _ in ordered[-1].makes:
            for i in waiting.get(value, ()):
                missing[i].discard(value)
                if not missing[i]:
                    ready[ops[i].ahead].append(i)
    return ordered
