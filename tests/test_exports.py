"""The public names: no more than these, all documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import devicemap

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "api.md"
NAMES = [
    "DeviceMap", "Pipeline", "Reducer", "benchmark", "connect", "list_devices", "open_results", "parallel_map",
    "parallel_reduce",
    "parallel_tasks", "parallelize", "simulate_devices", "split", "spread_variables",
]  # fmt: skip


def test_exports_are_exactly_these() -> None:
    assert devicemap.__all__ == NAMES
    public = [name for name in dir(devicemap) if not name.startswith("_")]  # they are imported on first use
    assert public == sorted([*NAMES, "errors", "types"])
    assert all(hasattr(devicemap, name) for name in dir(devicemap))


def test_exports_and_methods_are_documented() -> None:
    functions = inspect.getmembers(devicemap.DeviceMap, inspect.isfunction)
    methods = [method for name, method in functions if name[0] != "_" or name == "__call__"]
    assert methods
    exports = [getattr(devicemap, name) for name in NAMES]
    assert [each for each in (devicemap, *exports, *methods) if not inspect.getdoc(each)] == []


def _classes_in(hint: Any) -> set[type]:
    """Classes of the package in a type hint."""
    if get_args(hint):
        return {found for part in get_args(hint) for found in _classes_in(part)}
    if isinstance(hint, list):  # the arguments of a callable
        return {found for part in hint for found in _classes_in(part)}
    if not (inspect.isclass(hint) and hint.__module__.startswith("devicemap.")):
        return set()
    return {hint}


def test_types_has_what_calls_take_and_return() -> None:
    public = [getattr(devicemap, name) for name in NAMES]
    classes = devicemap.DeviceMap, devicemap.Pipeline
    members = [each for one in classes for name, each in vars(one).items() if name[0] != "_" and name != "devices"]
    methods = [getattr(member, "fget", member) for member in members]
    hints = [hint for call in (*public, *methods) for hint in get_type_hints(call).values()]
    found = {each for hint in hints for each in _classes_in(hint)} - {*classes}
    names = {each.__name__ for each in found}
    assert names >= {"Plan", "Report", "Verification", "BenchmarkResult", "Results", "Event"}
    assert all(vars(devicemap.types).get(each.__name__) is each for each in found)


def test_the_reference_has_them_all() -> None:
    """With what calls hand out: values, events and errors."""
    text = REFERENCE.read_text(encoding="utf-8")
    shown = {*re.findall(r"^::: devicemap\.(.+)$", text, re.M)}
    assert {*NAMES, *(f"types.{name}" for name in devicemap.types.__all__)} <= shown
    classes = [each for _, each in inspect.getmembers(devicemap.errors, inspect.isclass)]
    own = {each.__name__ for each in classes if each.__module__ == "devicemap.errors"}
    assert {*re.findall(r"\w+Error", text.partition("members:")[2])} == own
