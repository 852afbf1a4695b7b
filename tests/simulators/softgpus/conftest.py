"""Each test starts with GPUs that take no time, an empty copy log, and no memory held by the previous test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from skipping import pytest_make_collect_report as pytest_make_collect_report
from skipping import pytest_runtest_makereport as pytest_runtest_makereport


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    request.module.gpus.reset()
    yield
    request.module.gpus.reset()
    gc.collect()


def pytest_collection_finish() -> None:
    gc.freeze()  # keep imported modules out of each garbage collection
