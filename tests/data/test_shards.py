"""How many rows go where: balanced, contiguous, in order, none empty."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from devicemap.data.shards import ROWS_PER_CORE, shard_rows

counts = st.integers(0, 10_000)
names = st.lists(st.integers(0, 5).map("/device:CPU:{}".format), min_size=1, max_size=12)


@given(counts, names)
def test_shards_are_neighbours(rows: int, places: list[str]) -> None:
    shards = shard_rows(rows, places)
    assert [row for shard in shards for row in range(shard.start, shard.stop)] == list(range(rows))
    assert all(a.stop == b.start for a, b in pairwise(shards))
    assert [shard.device for shard in shards] == places[: len(shards)]
    sizes = [len(shard) for shard in shards]
    assert min(sizes, default=1) > 0
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(counts, st.integers(1, 12))
def test_every_device_gets_a_shard(rows: int, devices: int) -> None:
    """However few rows there are: only further cores of a device have to be worth it."""
    places = [f"/device:GPU:{i}" for i in range(devices)]
    assert len(shard_rows(rows, places)) == min(rows, devices)


@given(counts, st.integers(1, 4), st.integers(0, 12))
def test_further_cores_get_enough_rows(rows: int, devices: int, further: int) -> None:
    places = [f"/device:CPU:{i}" for i in range(devices)]
    shards = shard_rows(rows, places + places[:1] * further)
    if len(shards) > devices:
        assert min(map(len, shards)) >= ROWS_PER_CORE
    else:
        assert further == 0 or rows < ROWS_PER_CORE * (devices + 1)
