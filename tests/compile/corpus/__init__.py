"""Functions of one row as users write them, each with data: what `vectorize="auto"` is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile.corpus import algebra, control_flow, dynamics, images, networks, signals, statistics, structures

FIELDS: dict[str, dict[str, tuple[Callable[..., Any], Any]]] = {
    module.__name__.rpartition(".")[2]: module.FUNCTIONS
    for module in (signals, images, dynamics, algebra, statistics, networks, structures, control_flow)
}
"""Field -> name -> function and data; a tuple is several arguments."""

CASES = {name: case for functions in FIELDS.values() for name, case in functions.items()}

NOT_VECTORIZED_BY_TENSORFLOW = frozenset((
    "peak frequency", "median filter", "energy above threshold", "gradient magnitude", "unsharp mask",
    "augmentation of a seed", "random crop of a seed", "resized and scaled", "HSV and back", "histogram",
    "patch embedding", "kept boxes", "structural similarity", "least squares by QR", "pseudo-inverse", "Procrustes",
    "square root of a matrix", "determinant and inverse", "LU solve", "histogram and entropy", "bag of words",
    "greedy decoding", "gradient of weights", "Conv3D", "SeparableConv1D", "edit distance", "unique values",
    "numbers in text", "hash of text", "lookup of integers", "incomplete beta", "clipped by global norm",
    "among the best", "inverse permutation", "segments", "counts", "slice from an index", "bits of a float",
    "implicit Euler", "running logsumexp", "tokens", "scattered from zeros",
))  # fmt: skip
"""Names of functions for which `tf.vectorized_map(fallback_to_while_loop=False)` raises. It is right for the others."""

WITHOUT_GRADIENT = {
    "augmentation of a seed": "AdjustContrastv2",
    "colour jitter": "AdjustHue",
    "LU solve": "Lu",
}
"""Name -> the op that TensorFlow has no gradient of."""

VARIABLES = [networks.TABLE, *control_flow.VARIABLES]
"""Variables that functions read."""
