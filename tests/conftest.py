"""Eight logical CPU devices, made once before TensorFlow initialises, the simulator, and what the laws are crossed with."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

import devicemap
from benchmarks.simulator.fixtures import sim as sim
from devicemap import internals

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts its background jobs, and those their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

devicemap.simulate_devices(8)
tf.config.threading.set_inter_op_parallelism_threads(16)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plain", action="store_true", help="use of TensorFlow what is public alone")


def pytest_configure(config: pytest.Config) -> None:
    internals.private = not config.getoption("plain")
    if not internals.private:
        config.addinivalue_line("filterwarnings", "ignore:this TensorFlow does not show what:RuntimeWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("private")
        if marker is not None and not internals.private:
            item.add_marker(pytest.mark.skip(f"TensorFlow has no public name for it: {marker.args[0]}"))


@pytest.fixture(params=[1, 2, 3, 8], ids="{} devices".format)
def devices(request: pytest.FixtureRequest) -> list[str]:
    """The device sets of the laws; not in order of their index, and not all of them on the home of variables."""
    return [f"CPU:{i}" for i in (3, 0, 5, 1, 2, 4, 6, 7)][: request.param]


@pytest.fixture(autouse=True)
def _no_seed() -> Iterator[None]:
    """Tests that set TensorFlow's global seed leave none behind."""
    yield
    tf.random.set_seed(None)
