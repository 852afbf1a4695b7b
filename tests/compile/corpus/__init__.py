"""Functions of one row as users write them, each with data: what `vectorize="auto"` is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile.corpus import algebra, dynamics, images, networks, signals, statistics, structures

FIELDS: dict[str, dict[str, tuple[Callable[..., Any], Any]]] = {
    module.__name__.rpartition(".")[2]: module.FUNCTIONS
    for module in (signals, images, dynamics, algebra, statistics, networks, structures)
}
"""Field -> name -> function and data; a tuple is several arguments."""

CASES = {name: case for functions in FIELDS.values() for name, case in functions.items()}
