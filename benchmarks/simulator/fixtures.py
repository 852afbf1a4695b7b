"""The simulator as a fixture of pytest, which the conftests of the tests and of the benchmarks import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .building import Unavailable
from .simulation import Simulator, load


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """The simulated accelerators, fresh before and after; where they cannot be had, the test is skipped, and says why."""
    try:
        simulator = load()
    except Unavailable as reason:
        pytest.skip(str(reason))
    simulator.reset()
    yield simulator
    simulator.reset()
