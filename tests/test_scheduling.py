"""How large a chunk of samples is, and how many are on their way at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devicemap.scheduling import chunks_in_flight, samples_per_chunk
from devicemap.sharding import chunk_bounds

devices = st.integers(1, 16)


@pytest.mark.parametrize(
    ("samples", "devices", "size"),
    [
        (None, 1, 32),
        (None, 8, 32),
        (0, 1, 1),
        (1, 8, 1),
        (32, 8, 1),
        (33, 8, 2),
        (4096, 1, 1024),
        (4097, 1, 1024),
        (10**9, 8, 1024),
    ],
)
def test_samples_per_chunk(samples: int | None, devices: int, size: int) -> None:
    assert samples_per_chunk(samples, devices) == size


@given(st.integers(0, 10**7), devices)
def test_samples_per_chunk_are_few_and_never_none(samples: int, devices: int) -> None:
    assert 1 <= samples_per_chunk(samples, devices) <= 1024


@given(st.integers(1, 5000), devices)
def test_every_device_can_have_a_chunk(samples: int, devices: int) -> None:
    """Rows permitting: halving is not allowed to leave devices without work."""
    chunks = len(list(chunk_bounds(samples, samples_per_chunk(samples, devices))))
    assert chunks >= min(samples, devices)


@given(st.integers(0, 10**7), devices)
def test_more_devices_never_make_larger_chunks(samples: int, devices: int) -> None:
    assert samples_per_chunk(samples, devices + 1) <= samples_per_chunk(samples, devices)


@given(devices)
def test_chunks_in_flight(workers: int) -> None:
    """One in work and one waiting per worker."""
    assert chunks_in_flight(workers) == 2 * workers
