"""Functions of one row as users write them, each with data: what `vectorize="auto"` is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile.corpus import calculus, control_flow, networks, structures

FIELDS: dict[str, dict[str, tuple[Callable[..., Any], Any]]] = {
    module.__name__.rpartition(".")[2]: module.FUNCTIONS for module in (calculus, networks, structures, control_flow)
}
"""Field -> name -> function and data; a tuple is several arguments."""

CASES = {name: case for functions in FIELDS.values() for name, case in functions.items()}

NOT_VECTORIZED_BY_TENSORFLOW = frozenset((
    "bag of words", "greedy decoding", "gradient of weights", "Conv3D", "SeparableConv1D", "edit distance",
    "unique values", "numbers in text", "hash of text", "lookup of integers", "segments", "counts",
    "slice from an index", "bits of a float", "running logsumexp", "tokens", "scattered from zeros",
))  # fmt: skip
"""Names of functions for which `tf.vectorized_map(fallback_to_while_loop=False)` raises. It is right for the others."""

VARIABLES = [networks.TABLE, *control_flow.VARIABLES]
"""Variables that functions read."""
