"""Which rows make a chunk, and in what order chunks go out: integers only."""

from __future__ import annotations

_CHUNKS_PER_DEVICE = 4
_SAMPLES_PER_CHUNK = 32
_MOST_SAMPLES_PER_CHUNK = 1024


def samples_per_chunk(samples: int | None, devices: int) -> int:
    """How many samples of a dataset go to a device at once; `samples` is `None` where nobody knows.

    Several chunks per device let uneven rows even out; a cap bounds the memory.

    >>> samples_per_chunk(100, 4), samples_per_chunk(3, 8), samples_per_chunk(None, 2)
    (7, 1, 32)
    """
    if samples is None:
        return _SAMPLES_PER_CHUNK
    return max(1, min(_MOST_SAMPLES_PER_CHUNK, -(-samples // (_CHUNKS_PER_DEVICE * devices))))


def chunks_in_flight(workers: int) -> int:
    """How many chunks may be read and not yet delivered: one in work and one waiting for its turn per worker."""
    return 2 * workers
