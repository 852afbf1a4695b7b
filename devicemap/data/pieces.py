"""How many rows a device that is done takes next: arithmetic alone, so that it serves numbers and tensors.

Weighted factoring (Hummel et al., 1996): a device takes a part of what it would compute of the rest, at the speeds measured
so far. Those may be wrong, where the first rows are the dearest, or cheap; so a piece takes no longer than a part of the time
that the call has run, and grows with it. Played through in `tests/data/test_pieces.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PARTS = 3.0
"""A piece is at most this part of what the device is expected to compute of what is left."""

_GROWTH = 0.3
"""A piece takes no longer than this part of the time since the call began."""

SHORTEST_SECONDS = 0.004
"""Pieces may take as long as this at any time: taking one costs a fiftieth of it."""

_PROBES = 64
"""A device that has not been measured takes this part of its even share."""

_PATIENCE = 1.5
"""How much later than all others a device may end with one row more."""


LONG_SECONDS = 0.1
"""A call in memory that takes less has little to gain from balance."""


COMPILING_SECONDS = 3.0
"""Compiling a graph that balances itself takes a part of it; a map that has worked for less goes on without."""


def balance_pays(rows: Any, in_shards: Any, balanced: Any, most: Callable[..., Any] = max) -> Any:
    """Whether a call had better balance itself than give each device a shard, by the seconds per row of either before.

    >>> balance_pays(1000, in_shards=0.001, balanced=0.0002), balance_pays(1000, in_shards=0.00001, balanced=0.0)
    (True, False)
    """
    return rows * in_shards > most(rows * balanced, LONG_SECONDS)


def first_piece(rows: Any, places: int) -> Any:
    """Rows of the first piece of a device that has not been measured, less than one where rows are few.

    >>> first_piece(4096, 8)
    8
    """
    return rows // (places * _PROBES)


def next_piece(
    rows_left: Any,
    speed: Any,
    all_speeds: Any,
    elapsed_seconds: Any,
    least: Callable[[Any, Any], Any] = min,
    most: Callable[[Any, Any], Any] = max,
) -> Any:
    """How many rows, with a fraction, a device takes next.

    Args:
        rows_left: rows that no device has taken.
        speed: rows per second of the device.
        all_speeds: of it and all others together.
        elapsed_seconds: since the call began.
        least, most: of two numbers; `tf.minimum` and `tf.maximum` for tensors.

    >>> next_piece(rows_left=800, speed=100.0, all_speeds=800.0, elapsed_seconds=10.0)
    33.333333333333336
    >>> next_piece(rows_left=800, speed=100.0, all_speeds=800.0, elapsed_seconds=0.1)
    3.0
    """
    share = rows_left * speed / all_speeds / _PARTS
    return least(share, speed * most(_GROWTH * elapsed_seconds, SHORTEST_SECONDS))


def seconds_too_late(
    rows_left: Any, speed: Any, speed_of_others: Any, fastest_other: Any, most: Callable[..., Any] = max
) -> Any:
    """By how much a device with one row more would end after all others, who compute what is left without it.

    >>> seconds_too_late(rows_left=7, speed=1.0, speed_of_others=70.0, fastest_other=10.0) > 0
    True
    """
    return 1 / speed - _PATIENCE * most(rows_left / speed_of_others, 1 / fastest_other)
