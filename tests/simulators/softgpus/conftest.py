"""What every file here starts from: GPUs that take no time, a log that is empty, and no memory held by the test before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    request.module.gpus.reset()
    yield
    request.module.gpus.reset()
    gc.collect()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is not searched after each test
