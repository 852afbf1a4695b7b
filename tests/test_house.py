"""Imports go downwards in the list of floors, and never in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "devicemap"
FLOORS = (
    "cli", "types", "bench", "tasks", "cluster", "ray", "training", "pipelines", "api", "inspect", "store", "run", "compile",
    "data", "options", "devices", "hosts", "errors", "events", "_tensorflow",
)  # fmt: skip
"""From the top: each imports from its own floor and those below. `devicemap` itself is not in the list."""


FILES = sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "__init__.py", PACKAGE / "__main__.py"})
NAMES = [".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
MODULES = dict(zip(NAMES, FILES))


def _imported(name: str, at_import: bool) -> set[str]:
    """Modules of the package that a module imports: all of them, or those that it needs to be imported itself."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    nodes = tree.body if at_import else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "devicemap":
            module = node.module.removeprefix("devicemap").removeprefix(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix(".")
                found.add(inner if inner in MODULES else module)
    return found - {"", name}


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards(name: str) -> None:
    own = FLOORS.index(name.partition(".")[0])
    assert not {other for other in _imported(name, False) if FLOORS.index(other.partition(".")[0]) < own}


def test_imports_go_in_no_circle() -> None:
    ordered = TopologicalSorter({name: _imported(name, True) for name in MODULES}).static_order()  # raises for a circle
    assert {*ordered} == {*MODULES}
