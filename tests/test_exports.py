"""The public names: no more than these, all documented."""

from __future__ import annotations

import inspect

import pytest

import devicemap

NAMES = ["DeviceMap", "benchmark", "list_devices", "open_results", "parallel_map", "simulate_devices"]


def test_exports_are_exactly_these() -> None:
    assert devicemap.__all__ == NAMES
    public = [name for name in dir(devicemap) if not name.startswith("_")]  # they are imported on first use
    assert public == sorted([*NAMES, "errors", "types"])
    assert all(hasattr(devicemap, name) for name in dir(devicemap))


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
