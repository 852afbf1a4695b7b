"""A pytest plugin that runs Keras's own tests with each compiled model parallelized.

`OUTPUT=... DEVICES=... python -m pytest -p clients.keras_tests FILE` creates two logical CPUs. `DEVICES=2` passes each model to
`devicemap.parallelize` once it was compiled; `DEVICES=1` leaves the models as they are. For each test, a line of JSON with its
outcome is appended to the file OUTPUT.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

DEVICES = ["CPU:1", "CPU:0"]
_done: dict[str, Any] = {}
"""For the test that runs: how many models were parallelized, how many calls mapped, and the reasons of refusals."""


def pytest_configure(config: pytest.Config) -> None:
    import devicemap

    # Keras's packages leave out its conftest.py, from which tests import this.
    skip_if_backend = lambda backend, reason: pytest.mark.skipif(backend == "tensorflow", reason=reason)
    sys.modules["conftest"] = SimpleNamespace(skip_if_backend=skip_if_backend)  # type: ignore[assignment]
    devicemap.simulate_devices(len(DEVICES))
    if os.environ["DEVICES"] == "1":
        return
    import keras

    from devicemap.training.mapped_call import MappedCall

    # Keras's models inherit `compile` from two classes.
    for owner in {base for base in keras.Model.__mro__ if "compile" in vars(base)}:
        owner.compile = _parallelizing(owner.compile)
    MappedCall.run = _counted(MappedCall.run)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Derive from `keras.Model` the models of trainer_test.py, each of which is a trainer and a layer."""
    import keras

    for module in {item.module for item in items}:  # type: ignore[attr-defined]
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and issubclass(value, keras.layers.Layer) and hasattr(value, "train_step"):
                setattr(module, name, _as_model(value))


def _as_model(plain: Any) -> Any:
    """A subclass that is a `keras.Model`, and has the methods of the class itself where `keras.Model` has others."""
    import keras

    if issubclass(plain, keras.Model):
        return plain
    own = {name for name in vars(keras.Model) if name not in ("__dict__", "__weakref__", "__module__", "__doc__")}
    kept = {name: inspect.getattr_static(plain, name) for name in own if hasattr(plain, name)}
    return type(plain.__name__, (plain, keras.Model), kept)


def _parallelizing(compile: Any) -> Any:
    @functools.wraps(compile)
    def compiled(model: Any, *args: Any, **options: Any) -> Any:
        import devicemap
        from devicemap.errors import OptionError

        result = compile(model, *args, **options)
        if "detach" not in vars(model):
            try:
                devicemap.parallelize(model, DEVICES, added_losses="mean")
                _done["parallelized"] += 1
            except OptionError as refusal:
                _done["refused"].append(str(refusal))
        return result

    return compiled


def _counted(run: Any) -> Any:
    @functools.wraps(run)
    def counted(*args: Any, **options: Any) -> Any:
        _done["mapped"] += 1
        return run(*args, **options)

    return counted


def pytest_runtest_setup() -> None:
    _done.update(parallelized=0, mapped=0, refused=[])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = call.excinfo and call.excinfo.exconly()[:600]
        row = {"test": item.nodeid.partition("::")[2], "outcome": report.outcome, "error": error, **_done}
        with Path(os.environ["OUTPUT"]).open("a") as lines:
            print(json.dumps(row), file=lines)
    return report
