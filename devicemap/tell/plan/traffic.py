"""What goes from device to device in a call: from numbers of rows, sizes of rows and what is captured. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from devicemap.base.devices import kind_of
from devicemap.compile.cost.crossings import Crossings
from devicemap.tell.plan.plan import Captured, Handling, StrayOp, Transfer

_SENT = (Handling.COPIED, Handling.SEED)

ASKED_WHERE_IT_LIVES = (Handling.LOOKED_UP, Handling.ATOMIC, Handling.ORDERED)
"""What is captured and neither sent nor kept on devices."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of the data or of the results."""

    tensors: int
    """How many tensors it consists of: ragged and sparse leaves are several."""

    bytes_per_row: int | None
    """`None` where rows differ in size, or their shape is not known."""

    home: str
    """Full name of the device that it lives on, or comes to."""


def rows_sent(
    what: str, leaves: Sequence[Leaf], parts: Mapping[str, Sequence[int | None]], *, to_devices: bool, chunks: bool
) -> list[Transfer]:
    """The transfers of data to devices, or of results from there.

    `parts` are how many rows each shard of a device has, or all of its chunks; `None` where nobody knows.
    """
    per_row = _total(leaf.bytes_per_row for leaf in leaves)
    found = []
    for device, rows in parts.items():
        for home in dict.fromkeys(leaf.home for leaf in leaves if leaf.home != device):
            own = [leaf for leaf in leaves if leaf.home == home]
            sizes = [_times(leaf.bytes_per_row, count) for leaf in own for count in rows]
            tensors = None if chunks else len(rows) * sum(leaf.tensors for leaf in own)
            ends = (home, device) if to_devices else (device, home)
            found.append(Transfer(what, *ends, tensors, _total(sizes), per_row))
    return found


def captured_on(devices: Sequence[str], captured: Sequence[Captured], places: int) -> Iterator[Transfer]:
    """What is captured, as it goes to the devices, and updates and look-ups, as they go to where it lives.

    A seed goes to a device together with those of the other `places`.
    """
    for thing in captured:
        seeds = places if thing.handling is Handling.SEED else 1
        size = _times(thing.size_bytes, seeds)
        for device in devices:
            if device != thing.device and thing.handling in _SENT:
                yield Transfer(thing.name, thing.device, device, 1, size, None)
            elif device != thing.device and thing.handling in ASKED_WHERE_IT_LIVES:
                yield Transfer(thing.name, device, thing.device, None, None, None)


def to_memory(
    device: str, host: str, crossed: Callable[[int], Crossings | None], few_rows: int, rows: int | None
) -> Iterator[Transfer]:
    """What ops send from a device to the host's memory, and from there, by what crosses in a call on so many rows.

    What a row sends is told by how much more twice `few_rows` send; `rows` are those of the call, `None` where nobody knows.
    """
    few, more = (_sizes(crossed(count)) for count in (few_rows, 2 * few_rows))
    of_call = None if rows is None else _sizes(crossed(rows))
    for key in {**few, **more} if of_call is None else of_call:
        less, many = few.get(key, 0), more.get(key, 0)
        per_row = None if less is None or many is None else (many - less) // few_rows
        ends = (host, device) if key[1] else (device, host)
        yield Transfer(key[0], *ends, None, None if of_call is None else of_call[key], per_row)


def _sizes(crossings: Crossings | None) -> dict[tuple[str, bool], int | None]:
    """Bytes, by what they are and whether they go to the device."""
    found: dict[tuple[str, bool], list[int | None]] = {}
    for each in crossings.others if crossings else ():
        found.setdefault((each.what, each.to_device), []).append(each.size_bytes)
    return {key: _total(sizes) for key, sizes in found.items()}


def to_strays(
    devices: Sequence[str], strays: Sequence[StrayOp], host: str, known: Collection[str] = ()
) -> Iterator[Transfer]:
    """What goes from devices to ops that do not run on them: where there is no kernel, to the host.

    What goes to `known` devices is told otherwise.
    """
    for stray in strays:
        for device in devices:
            target = stray.device
            if stray.reason in ("no kernel", "int32"):
                target = host if kind_of(device) == stray.device else device
            if target != device and target not in known:
                yield Transfer(stray.op, device, target, None, None, None)


def _times(size: int | None, count: int | None) -> int | None:
    return None if size is None or count is None else size * count


def _total(sizes: Iterable[int | None]) -> int | None:
    """Their sum, `None` where one is not known."""
    known = list(sizes)
    return None if None in known else sum(size or 0 for size in known)
