"""Converters of ops for which TensorFlow's `pfor` has no converter, or one that is incorrect or slow for some calls.

`tests/compile/test_vectorizable_ops.py` compares each of them with `tf.map_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.control_flow import CONTROL_FLOW
from devicemap._tensorflow.gradients import COMPUTES_VECTORS
from devicemap._tensorflow.indexing import (
    LISTS,
    convert_gather_nd,
    convert_list,
    convert_lookup,
    convert_pack,
    convert_segments,
    convert_shared,
    convert_shared_segments,
    convert_slice,
    convert_strided_slice,
)
from devicemap._tensorflow.pfor import (
    Converter,
    NotVectorizableError,
    convert_as_tensorflow,
    for_all_rows,
    merge_axes,
    pfor,
    run_again,
    split_axis,
    wrap_stacked,
)
from devicemap._tensorflow.products import convert_product, convert_solve

Rule = Callable[[Any, int], Any]
"""`(given, index)`, an op and the index of an input -> the input of the op for all rows."""


def by(*rules: Rule) -> Converter:
    """Return a converter that runs the op once. Each rule converts an input, and the last rule all further inputs."""
    return lambda given: wrap_stacked(_run(given, rules))


def by_merging(*rules: Rule) -> Converter:
    """Return a converter of an op whose results, and inputs with the rule `batch`, have a batch as their first axis.

    The row axis is merged into the batch.
    """

    def convert(given: Any) -> Any:
        rows = for_all_rows(given, rules.index(batch))
        return wrap_stacked(_split_batch(rows, result) for result in _run(given, rules))

    return convert


def _run(given: Any, rules: Sequence[Rule]) -> list[Any]:
    """Run an op on the inputs that the rules return."""
    indices = range(given.num_inputs)
    return run_again(given.op, [rules[min(index, len(rules) - 1)](given, index) for index in indices])


def batch(given: Any, index: int) -> Any:
    """Merge the row axis into the batch."""
    return _merge_batch(for_all_rows(given, index))


def batch_sizes(given: Any, index: int) -> Any:
    """Multiply the length of the batch, in a shape, by the number of rows."""
    shape = given.unstacked_input(index)
    return tf.concat([shape[:1] * tf.cast(given.pfor.loop_len_vector, shape.dtype), shape[1:]], 0)


def shared(given: Any, index: int) -> Any:
    """Take an input that is the same for all rows."""
    return given.unstacked_input(index)


def axes(given: Any, index: int) -> Any:
    """Count axes without the row axis."""
    counted = given.unstacked_input(index)
    return counted + tf.cast(counted >= 0, counted.dtype)


def paddings(given: Any, index: int) -> Any:
    """Pad all axes except that of the rows. TensorFlow's converter of PadV2 drops `constant_values`."""
    of_row = given.unstacked_input(index)
    return tf.concat([tf.zeros([1, 2], of_row.dtype), of_row], 0)


def shape_with_rows(given: Any, index: int) -> Any:
    """Prefix a shape with the number of rows."""
    shape = given.unstacked_input(index)
    return tf.concat([tf.cast(given.pfor.loop_len_vector, shape.dtype), shape], 0)


def indices_with_row(given: Any, index: int) -> Any:
    """Prefix each index with the number of its row: `[rows, ..., depth]` -> `[rows, ..., depth + 1]`."""
    indices, rows = for_all_rows(given, index), given.pfor.loop_len_vector
    outer = tf.shape(indices)[:-1]
    row = tf.reshape(tf.range(rows[0]), tf.concat([rows, tf.ones_like(outer[1:])], 0))
    row = tf.broadcast_to(row, outer)[..., tf.newaxis]
    return tf.concat([tf.cast(row, indices.dtype), indices], -1)


_MERGED = "_devicemap_merged"
"""Attribute of a tensor `[rows, batch, ...]`: the tensor `[rows * batch, ...]` that it was split from."""


def _merge_batch(tensor: Any) -> Any:
    """`[rows, batch, ...]` -> `[rows * batch, ...]`."""
    return getattr(tensor, _MERGED) if hasattr(tensor, _MERGED) else merge_axes(tensor, 2)


def _split_batch(rows: Any, merged: Any) -> Any:
    """`[rows * batch, ...]` -> `[rows, batch, ...]`, as of `rows`."""
    result = split_axis(merged, rows, 2)
    setattr(result, _MERGED, merged)
    return result


def convert_fusible(given: Any) -> Any:
    """Add a shared bias, or rectify, before a merged batch is split by rows.

    Grappler fuses both with a convolution only if no Reshape is between them (test_no_reshape_keeps_grappler_from_fusing).
    """
    others_stacked = any(stacked for _, stacked, _ in given.inputs[1:])
    if hasattr(given.input(0).t, _MERGED) and not others_stacked:
        return by_merging(batch, shared)(given)
    return convert_as_tensorflow(given)


def convert_reduction(given: Any) -> Any:
    """Reduce over int32 axes, because TensorFlow's `_SumGrad` fails for int64 axes if lengths are unknown."""
    reduce, axis = getattr(tf.raw_ops, given.op_type), tf.cast(axes(given, 1), tf.int32)
    return wrap_stacked([reduce(input=for_all_rows(given, 0), axis=axis, keep_dims=given.get_attr("keep_dims"))])


def convert_transpose(given: Any) -> Any:
    """Permute all axes except that of the rows. TensorFlow's converter mishandles negative axes and conjugated vectors.

    Real numbers are not conjugated, because Grappler replaces ConjugateTranspose by Conj, which has no kernel for them, if
    no axis moves (test_calls_of_each_op).
    """
    of_row = given.unstacked_input(1)
    order = tf.concat([[0], tf.cast(tf.math.floormod(of_row, tf.size(of_row, of_row.dtype)) + 1, tf.int32)], 0)
    return wrap_stacked([tf.transpose(given.stacked_input(0), order, conjugate=given.op_type != "Transpose")])


def convert_roll(given: Any) -> Any:
    """Roll along non-negative axes. TensorFlow's converter mishandles negative ones."""
    rows, axis = for_all_rows(given, 0), given.unstacked_input(2)
    axis = tf.math.floormod(axis, tf.cast(tf.rank(rows) - 1, axis.dtype))
    given.inputs[0], given.inputs[2] = pfor.wrap(rows, True), pfor.wrap(axis, False)
    return convert_as_tensorflow(given)


def convert_squeeze(given: Any) -> Any:
    """Squeeze all axes except that of the rows, which TensorFlow's converter drops if there is one row."""
    rows, shape = given.stacked_input(0), given.op.inputs[0].shape
    dropped = [axis + 1 if axis >= 0 else axis for axis in given.get_attr("squeeze_dims")]
    if not dropped:
        if not shape.is_fully_defined():
            raise NotVectorizableError("drops axes that are only known when it runs")
        dropped = [axis + 1 for axis, length in enumerate(shape) if length == 1]
    return wrap_stacked([tf.squeeze(rows, dropped) if dropped else tf.identity(rows)])


def convert_size(given: Any) -> Any:
    """Multiply the lengths of axes. TensorFlow's converter divides by the number of rows, which may be 0."""
    return pfor.wrap(tf.reduce_prod(tf.shape(given.stacked_input(0), given.get_attr("out_type"))[1:]), False)


def convert_select(given: Any) -> Any:
    """Convert `tf.compat.v1.where`, which aligns the condition with the first axes of the values."""
    condition, x, y = (for_all_rows(given, index) for index in range(3))
    ranks = [each.shape.rank for each in given.op.inputs]
    if None in ranks:
        raise NotVectorizableError("has inputs of unknown rank")
    for axis in range(condition.shape.rank, x.shape.rank):
        condition = tf.expand_dims(condition, axis)
    return wrap_stacked([tf.where(condition, x, y)])


def convert_l2_loss(given: Any) -> Any:
    """Compute half the sum of squares of each row."""
    rows = given.stacked_input(0)
    halves = rows * (rows / 2)  # halved first, because the sum of squares may overflow in float16
    return wrap_stacked([tf.reduce_sum(halves, tf.range(1, tf.rank(rows)))])


def convert_bias_gradient(given: Any) -> Any:
    """Sum over all axes except those of the rows and the channels."""
    rows, rank = given.stacked_input(0), given.op.inputs[0].shape.rank
    if rank is None:
        raise NotVectorizableError("has an input of unknown rank")
    channels = 2 if given.get_attr("data_format") == b"NCHW" else rank
    return wrap_stacked([tf.reduce_sum(rows, [axis for axis in range(1, rank + 1) if axis != channels])])


def convert_batch_normalization(given: Any) -> Any:
    """Normalise with given moments. The other results are unused (`vectorizable_ops.EXCEPTIONS`)."""
    result, *others = _run(given, [batch, shared])
    return [
        pfor.wrap(_split_batch(for_all_rows(given, 0), result), True),
        *(pfor.wrap(other, False) for other in others),
    ]


def convert_depthwise(given: Any) -> Any:
    """Convolve. TensorFlow's converter requires filters that differ between rows."""
    if given.input(1).is_stacked:
        return convert_as_tensorflow(given)
    return by_merging(batch, shared)(given)


def convert_decomposition(given: Any) -> Any:
    """Decompose matrices. Without vectors, TensorFlow leaves the other results undefined; they are empty here."""
    values, *others = run_again(given.op, [given.stacked_input(0)])
    if given.get_attr(COMPUTES_VECTORS[given.op_type]):
        return wrap_stacked([values, *others])
    return [pfor.wrap(values, True), *(pfor.wrap(tf.zeros([0], other.dtype), False) for other in others)]


def convert_bound(given: Any) -> Any:
    """Search in a sorted sequence for the values of all rows at once, if rows share it. Otherwise, each row has its own."""
    (sequence, differs, _), wanted = given.input(0), given.input(1)
    if differs or not wanted.is_stacked or given.op.inputs[0].shape[0] != 1:
        return by_merging(batch, batch, shared)(given)
    (found,) = run_again(given.op, [sequence, tf.reshape(wanted.t, [1, tf.size(wanted.t)])])
    return wrap_stacked([tf.reshape(found, tf.shape(wanted.t))])


def _all(ops: str, converter: Converter) -> dict[str, Converter]:
    return dict.fromkeys(ops.split(), converter)


CONVERTERS: dict[str, Converter] = {
    **CONTROL_FLOW,
    **dict.fromkeys(LISTS, convert_list),
    **_all(
        "AsString Betainc Bitcast Cast CholeskyGrad DecodeBase64 EncodeBase64 HSVToRGB Lu MatrixDeterminant "
        "MatrixLogarithm MatrixSquareRoot PopulationCount PreventGradient Qr RGBToHSV Snapshot StaticRegexFullMatch "
        "StaticRegexReplace StringJoin StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast "
        "StringToHashBucketStrong StringToNumber StringUpper TridiagonalMatMul TridiagonalSolve",
        by(for_all_rows),
    ),
    **_all(
        "AvgPool AvgPool3D Conv2D Conv3D DepthToSpace Dilation2D ExtractImagePatches LRN MaxPool MaxPool3D MaxPoolV2 "
        "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ResizeNearestNeighborGrad SpaceToDepth",
        by_merging(batch, shared),
    ),
    **_all(
        "InTopKV2 ResizeBicubicGrad ResizeBilinearGrad SoftmaxCrossEntropyWithLogits "
        "SparseSoftmaxCrossEntropyWithLogits",
        by_merging(batch, batch, shared),
    ),
    **_all(
        "LRNGrad MaxPool3DGrad MaxPoolGrad MaxPoolGradV2",
        by_merging(batch, batch, batch, shared),
    ),
    **_all("AvgPool3DGrad AvgPoolGrad", by_merging(batch_sizes, batch)),
    **_all(
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
        by_merging(batch_sizes, shared, batch),
    ),
    **_all("All Any EuclideanNorm Max Mean Min Prod Sum", convert_reduction),
    **_all("Pad PadV2 MirrorPad", by(for_all_rows, paddings, shared)),
    **_all("Transpose ConjugateTranspose", convert_transpose),
    **_all("MatMul BatchMatMul BatchMatMulV2", convert_product),
    **_all("MatrixSolve MatrixTriangularSolve", convert_solve),
    **_all(
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum",
        convert_segments,
    ),
    **_all(
        "TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate",
        by(for_all_rows, indices_with_row, for_all_rows),
    ),
    **_all("SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum", convert_shared_segments),
    **_all("BiasAdd Relu", convert_fusible),
    **_all("LowerBound UpperBound", convert_bound),
    "BiasAddGrad": convert_bias_gradient,
    "DepthwiseConv2dNative": convert_depthwise,
    **_all("CumulativeLogsumexp ReduceJoin", by(for_all_rows, axes)),
    **_all("DecodeCSV Substr TopKV2", by(for_all_rows, shared)),
    **_all(" ".join(COMPUTES_VECTORS), convert_decomposition),
    "FusedBatchNormV3": convert_batch_normalization,
    "GatherNd": convert_gather_nd,
    "L2Loss": convert_l2_loss,
    **_all("LookupTableFindV2 ResourceGather ResourceGatherNd", convert_lookup),
    "LookupTableSizeV2": convert_shared,
    "Pack": convert_pack,
    "Roll": convert_roll,
    "ScatterNd": by(indices_with_row, for_all_rows, shape_with_rows),
    "Select": convert_select,
    "Size": convert_size,
    "Slice": convert_slice,
    "Squeeze": convert_squeeze,
    "StridedSlice": convert_strided_slice,
}
"""By type of op."""
