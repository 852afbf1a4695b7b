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

NOT_VECTORIZED_BY_TENSORFLOW = {
    "peak frequency": "StridedSlice from a begin of the row",
    "median filter": "no converter of MirrorPad",
    "energy above threshold": "no converter of Where",
    "gradient magnitude": "no converter of MirrorPad",
    "unsharp mask": "DepthwiseConv2dNative with a filter that rows share",
    "augmentation of a seed": "no converter of StatelessRandomGetKeyCounter",
    "random crop of a seed": "no converter of StatelessRandomGetKeyCounter",
    "resized and scaled": "no converter of ResizeBilinear",
    "resized bicubic with antialiasing": "no converter of ScaleAndTranslate",
    "HSV and back": "no converter of RGBToHSV",
    "histogram": "no converter of DenseBincount",
    "patch embedding": "no converter of ExtractImagePatches",
    "kept boxes": "no converter of NonMaxSuppressionV3",
    "structural similarity": "DepthwiseConv2dNative with a filter that rows share",
    "implicit Euler": "no converter of TridiagonalSolve",
    "least squares by QR": "no converter of Qr",
    "pseudo-inverse": "no converter of Svd",
    "Procrustes": "no converter of Svd",
    "square root of a matrix": "no converter of MatrixSquareRoot",
    "determinant and inverse": "no converter of MatrixDeterminant",
    "LU solve": "no converter of Lu",
    "histogram and entropy": "no converter of HistogramFixedWidth",
    "bag of words": "no converter of ResourceGather",
    "greedy decoding": "no converter of ResourceGather",
    "gradient of weights": "no converter of L2Loss",
    "Conv3D": "no converter of Conv3D",
    "SeparableConv1D": "DepthwiseConv2dNative with a filter that rows share",
    "edit distance": "no converter of TensorScatterMin",
    "unique values": "no converter of Unique",
    "numbers in text": "no converter of AsString",
    "hash of text": "no converter of StringToHashBucketFast",
    "lookup of integers": "no converter of LookupTableFindV2",
    "text": "no converter of StringUpper",
    "incomplete beta": "no converter of Betainc",
    "clipped by global norm": "no converter of L2Loss",
    "among the best": "no converter of InTopKV2",
    "inverse permutation": "no converter of InvertPermutation",
    "segments": "no converter of SegmentSum",
    "counts": "no converter of TensorScatterAdd",
    "row at an index": "StridedSlice from a begin of the row",
    "slice from an index": "StridedSlice from a begin of the row",
    "bits of a float": "no converter of Bitcast",
    "running logsumexp": "no converter of CumulativeLogsumexp",
    "tokens": "no converter of StringLower",
    "scattered from zeros": "no converter of ScatterNd",
}
"""Name -> why `tf.vectorized_map(fallback_to_while_loop=False)` raises. It gives no wrong result for the others."""

WITHOUT_GRADIENT = {
    "augmentation of a seed": "AdjustContrastv2",
    "colour jitter": "AdjustHue",
    "LU solve": "Lu",
}
"""Name -> the op that TensorFlow has no gradient of."""
