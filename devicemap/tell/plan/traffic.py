"""What goes from device to device in a call: from numbers of rows, sizes of rows and what is captured. No tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from devicemap.base.devices import kind_of
from devicemap.compile.cost.memory import Crossing, Crossings
from devicemap.events import Shard
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


def rows_in_one_graph(
    what: str, leaves: Sequence[Leaf], shards: Sequence[Shard], *, to_devices: bool, rows_known: bool
) -> list[Transfer]:
    """The transfers of data to the devices of `shards`, or of results from there.

    Several shards on a device are one transfer. Where the rows are not known, the shards stand for one row each.
    """
    found: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    for shard in shards:
        for leaf in leaves:
            ends = (leaf.home, shard.device) if to_devices else (shard.device, leaf.home)
            if ends[0] != ends[1]:
                size = None if leaf.bytes_per_row is None or not rows_known else leaf.bytes_per_row * len(shard)
                found.setdefault(ends, []).append((leaf.tensors, size))
    per_row = total(leaf.bytes_per_row for leaf in leaves)
    return [
        Transfer(what, *ends, sum(tensors for tensors, _ in parts), total(size for _, size in parts), per_row)
        for ends, parts in found.items()
    ]


def rows_in_chunks(
    what: str, leaves: Sequence[Leaf], devices: Sequence[str], rows: int | None, *, to_devices: bool
) -> list[Transfer]:
    """The same for chunks, which go to whichever device is idle: only a single device is known to get all rows."""
    per_row = total(leaf.bytes_per_row for leaf in leaves)
    of_call = per_row * rows if len(devices) == 1 and rows is not None and per_row is not None else None
    return [
        Transfer(what, *((home, device) if to_devices else (device, home)), None, of_call, per_row)
        for device in devices
        for home in dict.fromkeys(leaf.home for leaf in leaves)
        if home != device
    ]


def captured_on(devices: Sequence[str], captured: Sequence[Captured], places: int) -> Iterator[Transfer]:
    """What is captured, as it goes to the devices, and updates and look-ups, as they go to where it lives.

    A seed goes to a device together with those of the other `places`.
    """
    for thing in captured:
        for device in dict.fromkeys(devices):
            if device == thing.device:
                continue
            if thing.handling in _SENT:
                size = thing.size_bytes
                if size is not None and thing.handling is Handling.SEED:
                    size *= places
                yield Transfer(thing.name, thing.device, device, 1, size, None)
            elif thing.handling not in (Handling.IN_PLACE, Handling.KEPT):
                yield Transfer(thing.name, device, thing.device, None, None, None)


def between(few: Sequence[Crossing], more: Crossings | None, rows: int) -> dict[tuple[str, bool], int | None]:
    """Bytes that each so many rows more send, by what it is and whether to the device."""
    sizes = [_sums(few), _sums(more.others if more else ())]
    found: dict[tuple[str, bool], int | None] = {}
    for key in {**sizes[0], **sizes[1]}:
        less, many = (each.get(key, 0) for each in sizes)
        found[key] = None if less is None or many is None else (many - less) // rows
    return found


def to_memory(
    device: str, host: str, per_row: Mapping[tuple[str, bool], int | None], of_call: Crossings | None
) -> Iterator[Transfer]:
    """What ops send from a device to the host's memory, and from there."""
    sums = None if of_call is None else _sums(of_call.others)
    for key in per_row if sums is None else sums:
        ends = (host, device) if key[1] else (device, host)
        yield Transfer(key[0], *ends, None, None if sums is None else sums[key], per_row.get(key))


def _sums(crossings: Iterable[Crossing]) -> dict[tuple[str, bool], int | None]:
    found: dict[tuple[str, bool], list[int | None]] = {}
    for each in crossings:
        found.setdefault((each.what, each.to_device), []).append(each.size_bytes)
    return {key: total(sizes) for key, sizes in found.items()}


def to_strays(
    devices: Sequence[str], strays: Sequence[StrayOp], host: str, known: Collection[str] = ()
) -> Iterator[Transfer]:
    """What goes from devices to ops that do not run on them: where there is no kernel, to the host.

    What goes to `known` devices is told otherwise.
    """
    for stray in strays:
        for device in dict.fromkeys(devices):
            if stray.reason in ("no kernel", "int32"):
                target = host if kind_of(device) == stray.device else device
            else:
                target = stray.device
            if target != device and target not in known:
                yield Transfer(stray.op, device, target, None, None, None)


def total(sizes: Iterable[int | None]) -> int | None:
    """Their sum, `None` where one is not known."""
    known = list(sizes)
    return None if None in known else sum(size or 0 for size in known)
