"""Which ways of mapping a benchmark compares, the most telling first: names and integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MODES = ("eager", "graph")

_SIZES = 4
_FACTOR = 4
"""The default sweep: so many batch sizes, this factor apart. Throughput is flat near its best, so powers of 2 would only
take time that more rounds use better."""


@dataclass(frozen=True)
class Way:
    """One way of mapping the rows."""

    mode: str
    """`"graph"`: a `DeviceMap`. `"eager"`: `fn` in eager code, in a `tf.device` block per device, one after another."""

    devices: tuple[str, ...]
    """Full names of the devices it runs on."""

    batch_size: int | str | None
    """Rows per device call; `None` for one shard per device, `"auto"` for what a graph finds out."""

    vectorize: bool | str | None
    """The option of that name, where it has a meaning: in graph mode, for a `fn` of one sample. `None` elsewhere."""

    def __str__(self) -> str:
        vectorize = "" if self.vectorize in (None, "auto") else f", vectorize={self.vectorize}"
        return f"{self.mode} on {name_devices(self.devices)}, batch_size={self.batch_size}{vectorize}"


@dataclass(frozen=True)
class Skipped(Way):
    """A way that was not measured."""

    reason: str
    """Why, and what would change it."""


def ways_to_measure(
    modes: Sequence[str],
    devices: tuple[str, ...],
    batch_sizes: Sequence[int | str | None],
    batched: bool,
    vectorize: bool | str | None,
) -> list[Way]:
    """The ways to measure, the most telling first, since time may not suffice for all.

    Each batch size runs on all devices and on the first one alone. Eager code takes single samples one at a time, whatever
    the batch size, so that `batched=False` has no sweep there.

    Args:
        modes: of `MODES`.
        devices: full names.
        batch_sizes: the first one is that of the first comparison.
        batched: as in `DeviceMap`.
        vectorize: the option as the user gave it; `None` (not given) compares `"auto"` with `False`.
    """
    first, *others = batch_sizes
    main, *rest = [mode for mode in ("graph", "eager") if mode in modes]
    chosen: bool | str | None = None if batched else "auto" if vectorize is None else vectorize
    settings = [*((mode, first, chosen) for mode in (main, *rest)), *((main, size, chosen) for size in others)]
    if main == "graph" and not batched and vectorize is None:
        settings.append((main, first, False))
    settings += [(mode, size, chosen) for mode in rest for size in others]
    ways = []
    for mode, size, vectorize in settings:
        if mode == "eager":
            size, vectorize = (size if batched and size != "auto" else None), None
        ways += [Way(mode, names, size, vectorize) for names in (devices[:1], devices)]
    return list(dict.fromkeys(ways))  # one device is all of them, and eager samples are the same for every batch size


def default_batch_sizes(rows: int, devices: int) -> tuple[int | None, ...]:
    """One shard per device, and a few powers of two: from one chunk per device down.

    >>> default_batch_sizes(1000, 4)
    (None, 128, 32, 8, 2)
    >>> default_batch_sizes(3, 8)
    (None, 1)
    """
    largest = 2 ** (max(1, rows // devices).bit_length() - 1)
    sizes = [largest // _FACTOR**i for i in range(_SIZES)]
    return (None, *(size for size in sizes if size))


def name_devices(devices: Sequence[str]) -> str:
    """Devices in a few words.

    >>> name_devices(["/job:localhost/replica:0/task:0/device:GPU:1"])
    'GPU:1'
    >>> name_devices(["/device:GPU:0", "/device:GPU:1"])
    '2 GPUs'
    """
    names = [name.rpartition("device:")[2] for name in devices]
    if len(names) == 1:
        return names[0]
    kinds = {name.partition(":")[0] for name in names}
    return f"{len(names)} {kinds.pop()}s" if len(kinds) == 1 else f"{len(names)} devices"
