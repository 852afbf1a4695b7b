"""The number of chunks in flight on each device."""

from __future__ import annotations

from devicemap.base.devices import kind_of
from devicemap.compile.compiled import Compiled
from devicemap.run.schedule import chunks_in_flight


def in_flight(compiled: Compiled, prefetch: int | None) -> dict[str, int]:
    """Return the number of chunks that may be in flight on each device: one in all if `fn` depends on their order."""
    audit = compiled.traced.audit
    if audit.ordered:
        return {compiled.places[0]: 1}
    # Two chunks on one device would draw from one seed; each call of Python occupies a thread.
    if audit.advances_seed or audit.python:
        return dict.fromkeys(compiled.places, 1)
    return {
        device: prefetch or max(chunks_in_flight(kind_of(device)), compiled.places.count(device))
        for device in compiled.devices
    }
