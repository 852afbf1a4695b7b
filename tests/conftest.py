"""Eight logical CPU devices, created once before TensorFlow initialises; the simulator; which tests run, in which order."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import threads
from durations import DURATIONS
from selection import cover
from skipping import pytest_make_collect_report as pytest_make_collect_report
from skipping import pytest_runtest_makereport as pytest_runtest_makereport

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts its background jobs, and those their children
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plain", action="store_true", help="use only the public names of TensorFlow")
    parser.addoption(
        "--all", action="store_true", help="cross all values of the parameters, instead of each value once"
    )
    parser.addoption(
        "--update-messages",
        action="store_true",
        help="write tests/messages.txt, and output in docs/, instead of comparing",
    )
    parser.addoption("--gpus", type=int, default=0, help="run the tests for any devices on this many emulated GPUs")


def pytest_configure(config: pytest.Config) -> None:
    """Create the devices, except in the controller of pytest-xdist: it runs no test, and need not import TensorFlow."""
    if config.getoption("gpus"):
        from benchmarks import softgpu

        try:
            softgpu.compile_library()
        except softgpu.Unavailable as reason:
            raise pytest.UsageError(f"--gpus {config.getoption('gpus')}: {reason}") from reason
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("benchmarks.simulator.fixtures")
        _create_devices(config.getoption("gpus"), private=not config.getoption("plain"))


def _create_devices(gpus: int, private: bool) -> None:
    import tensorflow as tf

    import devicemap
    from benchmarks import softgpu
    from devicemap import _tensorflow

    if gpus:
        softgpu.start(max(gpus - 1, 1))
    if gpus > 1:  # the last two logical GPUs are halves of one physical GPU
        half = tf.config.LogicalDeviceConfiguration(memory_limit=256)
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[-1], [half, half])
    devicemap.simulate_devices(8)
    tf.config.threading.set_inter_op_parallelism_threads(16)
    _tensorflow.private = private


def _has_its_own(item: pytest.Item) -> bool:
    return any("devices" in mark.args[0] for mark in item.iter_markers("parametrize"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`devices`: the device sets of the laws; not in order of their index, and not all of them on the home of variables.

    On GPUs, one set has CPU devices, too, and one is two logical devices of a single GPU.
    """
    if "devices" in metafunc.fixturenames and not _has_its_own(metafunc.definition):
        gpus = metafunc.config.getoption("gpus")
        names = [f"GPU:{i}" for i in range(gpus)[::-1]] or [f"CPU:{i}" for i in (3, 0, 5, 1, 2, 4, 6, 7)]
        wanted = getattr(metafunc.module, "DEVICE_COUNTS", (1, 2, 4) if gpus else (1, 2, 3, 8))
        most = len(names) if metafunc.config.getoption("all") else 4
        counts = [count for count in wanted if count <= most]
        sets = {f"{count} devices": names[:count] for count in counts}
        if gpus > 1:
            sets["both kinds"] = ["GPU:1", "CPU:3", "GPU:0"]
        metafunc.parametrize("devices", sets.values(), ids=sets)


def _selected(items: list[pytest.Item]) -> list[pytest.Item]:
    """Select a part of the combinations of each test's parameters. The marker `in_ci(count)` limits their number."""
    tests: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        tests[item.nodeid.partition("[")[0]][item.nodeid] = item
    chosen = set[str]()
    for cells in tests.values():
        marker = next(iter(cells.values())).get_closest_marker("in_ci")
        chosen.update(cover({name: _values(item) for name, item in cells.items()}, marker.args[0] if marker else None))
    return [item for item in items if item.nodeid in chosen]


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    """Print how many tests were selected for each device set."""
    sets = Counter(re.findall(r"\d+ devices|both kinds", " ".join(item.nodeid for item in items)))
    return "; ".join(f"{count} tests on {name}" for name, count in sorted(sets.items()))


def _values(item: pytest.Item) -> dict[str, tuple[int, ...]]:
    """What stands for the value of each parameter; those that are given together are one."""
    if not hasattr(item, "callspec"):
        return {}
    values = {name: id(value) for name, value in item.callspec.params.items()}
    marked = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [names.replace(" ", "").split(",") if isinstance(names, str) else [*names] for names in marked]
    together += [[name] for name in values if not any(name in names for names in together)]
    return {",".join(names): tuple(values[name] for name in names) for names in together}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("gpus"):
        items[:] = [item for item in items if "devices" in getattr(item, "fixturenames", ()) and not _has_its_own(item)]
    if not config.getoption("all"):
        nightly = "not nightly" not in config.getoption("markexpr")
        selected = _selected([item for item in items if nightly or item.get_closest_marker("nightly") is None])
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected
    for item in items:
        marker = item.get_closest_marker("private")
        if marker is not None and config.getoption("plain"):
            item.add_marker(pytest.mark.skip(f"not applicable: TensorFlow has no public name for {marker.args[0]}"))
    durations = json.loads(DURATIONS.read_text(encoding="utf-8"))
    for item in items:
        if item.nodeid in durations["slow"]:
            item.add_marker("slow")
    items.sort(key=lambda item: -durations["files"].get(item.nodeid.partition("::")[0], 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip tests of what is refused without non-public names."""
    try:
        return (yield)
    except Exception as error:
        if item.config.getoption("plain") and "with this TensorFlow" in str(error):
            pytest.skip("not applicable: TensorFlow has no public names for what is refused")
        raise


def pytest_collection_finish() -> None:
    gc.freeze()  # keep imported modules out of each garbage collection
    gc.set_threshold(20_000, 20, 20)  # tracing would trigger hundreds of collections


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """No thread of the library outlives a test."""
    yield
    assert threads.running() == []


@pytest.fixture(autouse=True)
def _no_seed() -> Iterator[None]:
    """Tests that set TensorFlow's global seed leave none behind."""
    yield
    import tensorflow as tf

    if tf.compat.v1.get_seed(None) != (None, None):  # setting it drops every kernel that eager code has made
        tf.random.set_seed(None)
