"""The public names: no more than these, all documented."""

from __future__ import annotations

import inspect
import types

import pytest

import devicemap

NAMES = ["DeviceMap", "benchmark", "list_devices", "open_results", "parallel_map", "simulate_devices"]


def test_exports_are_exactly_these() -> None:
    assert devicemap.__all__ == NAMES
    public = {
        name
        for name in dir(devicemap)  # they are imported on first use
        if not name.startswith("_") and not isinstance(getattr(devicemap, name), types.ModuleType)
    }
    assert public == set(NAMES)


@pytest.mark.parametrize("name", ["", *NAMES])
def test_exports_are_documented(name: str) -> None:
    thing = getattr(devicemap, name) if name else devicemap
    assert inspect.getdoc(thing)


def test_methods_are_documented() -> None:
    methods = [
        method
        for name, method in vars(devicemap.DeviceMap).items()
        if inspect.isfunction(method) and (not name.startswith("_") or name == "__call__")
    ]
    assert methods
    assert all(inspect.getdoc(method) for method in methods)
