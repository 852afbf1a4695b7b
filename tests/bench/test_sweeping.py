"""Which ways a benchmark compares, and in which order."""

from __future__ import annotations

import pytest

from devicemap.bench.sweep import default_batch_sizes, name_devices, ways_to_measure

TWO = ("/device:GPU:0", "/device:GPU:1")


@pytest.mark.parametrize("rows", [1, 2, 7, 100, 10**6])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_default_batch_sizes_leave_no_device_idle(rows: int, devices: int) -> None:
    first, *sizes = default_batch_sizes(rows, devices)
    assert first is None
    assert sizes == sorted({size for size in sizes if size}, reverse=True)
    assert all(size & (size - 1) == 0 for size in sizes if size)
    assert 1 <= len(sizes) <= 4
    assert all(size <= max(1, rows // devices) for size in sizes if size)


def test_the_first_comparison_comes_first() -> None:
    for modes in (["eager"], ["graph"], ["eager", "graph"]):
        first, second, *_ = ways_to_measure(modes, TWO, [8, None], True, None)
        assert (first.devices, second.devices) == (TWO[:1], TWO)
        assert first.mode == second.mode == ("graph" if "graph" in modes else "eager")
        assert first.batch_size == second.batch_size == 8


def test_no_way_comes_twice() -> None:
    for batched in (True, False):
        ways = ways_to_measure(["eager", "graph"], TWO, [None, 4, 2], batched, None)
        assert len(ways) == len(set(ways)) == (12 if batched else 10)


def test_vectorising_is_compared_unless_it_is_chosen() -> None:
    def options(vectorize: bool | str | None, batched: bool = False) -> list[bool | str | None]:
        return [way.vectorize for way in ways_to_measure(["graph"], TWO[:1], [None], batched, vectorize)]

    assert options(None) == ["auto", False]
    assert options("auto") == ["auto"]
    assert options(True) == [True]
    assert options(False) == [False]
    assert options(None, batched=True) == [None]


def test_ways_in_words() -> None:
    auto, mapped = ways_to_measure(["graph"], TWO[:1], [4], False, None)
    assert str(auto) == "graph on GPU:0, batch_size=4"
    assert str(mapped) == "graph on GPU:0, batch_size=4, vectorize=False"


def test_devices_in_words() -> None:
    assert name_devices(TWO) == "2 GPUs"
    assert name_devices(("/device:GPU:1", "/device:CPU:0")) == "2 devices"
