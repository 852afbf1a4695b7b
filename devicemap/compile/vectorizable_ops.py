"""The ops that can run for all rows at once.

`tests/compile/test_vectorizable_ops.py` draws calls of each op in `OPS` and compares values and gradients with `tf.map_fn`.
Other ops, and the calls in `EXCEPTIONS`, run row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.control_flow import CONTROL_FLOW
from devicemap._tensorflow.converters import CONVERTERS
from devicemap._tensorflow.indexing import LISTS
from devicemap._tensorflow.pfor import NO_TILE

ELEMENTWISE = frozenset(
    "Abs Acos Acosh Add AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e "
    "BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 BitwiseAnd BitwiseOr BitwiseXor Bucketize "
    "Ceil CheckNumerics ClipByValue Complex ComplexAbs Conj Cos Cosh Dawsn Digamma Div DivNoNan Elu Equal Erf Erfc Erfinv "
    "Exp Expint Expm1 Floor FloorDiv FloorMod FresnelCos FresnelSin Greater GreaterEqual Identity IdentityN Igamma "
    "IgammaGradA Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd "
    "LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike Polygamma Pow Real RealDiv Reciprocal "
    "Relu Relu6 RightShift Rint Round Rsqrt SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Spence Sqrt Square "
    "SquaredDifference StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta".split()
)
"""Types of ops that compute each element by itself, and broadcast their inputs."""

OPS = ELEMENTWISE.union(
    CONVERTERS,
    # Gradients of these, of inputs with the same shape.
    "AddN EluGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad "
    "SqrtGrad TanhGrad "
    # Along axes.
    "ArgMax ArgMin Cumprod Cumsum LogSoftmax Softmax "
    # Shapes.
    "BatchToSpaceND BroadcastTo ConcatV2 EnsureShape ExpandDims Fill OneHot Rank Reshape ReverseV2 Shape ShapeN "
    "SpaceToBatchND Split SplitV StridedSliceGrad Tile Unpack "
    # Lookups.
    "GatherV2 "
    # Matrices on the last axes.
    "Cholesky Cross Diag DiagPart Einsum LogMatrixDeterminant MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV3 "
    "MatrixDiagV3 MatrixInverse MatrixSetDiag MatrixSetDiagV3 "
    # Transforms of the last axes.
    "AdjustContrastv2 AdjustHue AdjustSaturation FFT FFT2D FFT3D IFFT IFFT2D IFFT3D IRFFT IRFFT2D IRFFT3D RFFT RFFT2D RFFT3D "
    # Other numbers for each row.
    "Multinomial RandomGamma RandomPoissonV2 RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal "
    # Assertions and lists.
    "Assert TensorListElementShape TensorListLength TensorListPopBack".split(),
)
"""Types of ops that are tested, with a converter of TensorFlow or one of our own."""

_WITH_LISTS = frozenset(
    "AddN Identity IdentityN TensorListElementShape TensorListLength TensorListPopBack".split()
).union(CONTROL_FLOW, LISTS)


@dataclass(frozen=True)
class OpCall:
    """An op of a function of one row, and which of its inputs differ between rows."""

    op: Any
    """`tf.Operation`."""

    stacked: Sequence[bool]
    """For each input, whether it differs between rows."""

    def attribute(self, name: str) -> Any:
        """The value of an attribute."""
        return self.op.get_attr(name)

    def shape(self, index: int) -> Any:
        """The `tf.TensorShape` of an input, for one row."""
        return self.op.inputs[index].shape

    def has_same_shapes(self, *indices: int) -> bool:
        """Whether inputs are known to have the same shape."""
        first = self.shape(indices[0])
        return first.is_fully_defined() and all(self.shape(index) == first for index in indices)

    def broadcasts(self, x: int, y: int) -> bool:
        """Whether the shapes of two inputs are known to match."""
        shapes = self.shape(x), self.shape(y)
        if 0 in (shapes[0].rank, shapes[1].rank):
            return True
        try:  # TensorFlow takes an unknown length as matching, so both shapes have to be known
            tf.broadcast_static_shape(*shapes)
        except ValueError:
            return False
        return all(shape.is_fully_defined() for shape in shapes)

    def uses(self, index: int) -> bool:
        """Whether a result is used."""
        output = self.op.outputs[index]
        return bool(output.consumers()) or any(output is each for each in self.op.graph.outputs)


_LIMITED = frozenset(
    "ArgMax ArgMin BroadcastTo GatherNd MirrorPad Pad PadV2 ScatterNd SelectV2 Slice Softmax StridedSlice TensorScatterAdd "
    "TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate".split()
)
"""Types of ops whose kernels accept a limited number of axes."""

_MOST_AXES = 4
"""The number of axes to which each of these kernels, and each broadcast, can add the axis of all rows."""


def _may_exceed_kernel(call: OpCall) -> bool:
    """Whether TensorFlow's kernel may not accept the row axis as one more axis. It merges the axes of equal shapes."""
    if call.op.type in ELEMENTWISE and len(call.stacked) == 2:
        limited = 0 not in (call.shape(0).rank, call.shape(1).rank) and not call.has_same_shapes(0, 1)
    else:
        limited = call.op.type in _LIMITED
    return limited and any((each.shape.rank or 0) > _MOST_AXES for each in (*call.op.inputs, *call.op.outputs))


def _may_differ_in_size(call: OpCall) -> bool:
    """Whether rows may differ in the size of a slice. A size of -1 depends on the index that the slice begins at."""
    shape, begin = call.op.outputs[0].shape, tf.get_static_value(call.op.inputs[1], partial=True)
    if shape.rank is None:
        return True
    return any(length is None and (begin is None or begin[axis] is None) for axis, length in enumerate(shape))


Refuses = Callable[[OpCall], bool]
"""Whether a call of an op is not to be vectorised."""

EXCEPTIONS: Mapping[str, tuple[Refuses, str]] = {
    # The op takes scalar bounds, or bounds with the shape of x, which the row axis changes.
    "ClipByValue": (lambda call: not call.shape(1).rank == call.shape(2).rank == 0, "has bounds that are not scalars"),
    # TensorFlow places the channels of four axes.
    "BiasAdd": (
        lambda call: call.attribute("data_format") == b"NCHW" and call.stacked[1],
        "has another bias for each row, and channels before other axes",
    ),
    # TensorFlow counts negative batch_dims from the end of the indices with the row axis.
    "GatherV2": (
        lambda call: call.attribute("batch_dims") < 0 and not call.stacked[0],
        "has negative batch_dims and a tensor that all rows share",
    ),
    # If shapes do not match, the result for one row is a scalar.
    **dict.fromkeys(
        ("Equal", "NotEqual"),
        (
            lambda call: not (call.attribute("incompatible_shape_error") or call.broadcasts(0, 1)),
            "has inputs whose shapes may not match",
        ),
    ),
    # These ops broadcast their inputs, or take scalars, which the axis of all rows does not allow.
    "Betainc": (lambda call: not call.has_same_shapes(0, 1, 2), "has inputs that may have different shapes"),
    "SoftmaxCrossEntropyWithLogits": (
        lambda call: not call.has_same_shapes(0, 1),
        "has inputs that may have different shapes",
    ),
    "StringJoin": (
        lambda call: not call.has_same_shapes(*range(len(call.stacked))),
        "has inputs that may have different shapes",
    ),
    "Substr": (lambda call: call.shape(1).rank != 0, "has positions that are not scalars"),
    # TensorFlow formats all rows together.
    "StringFormat": (lambda call: True, "prints a tensor"),
    # For more axes, TensorFlow loops over rows.
    "Diag": (lambda call: call.shape(0).rank != 1, "has more than one axis"),
    "DiagPart": (lambda call: call.shape(0).rank != 2, "has more than two axes"),
    # TensorFlow divides by the number of elements.
    **dict.fromkeys(
        ("BatchToSpaceND", "SpaceToBatchND"),
        (lambda call: not call.shape(0).num_elements(), "has an input that may have no elements"),
    ),
    # input_sizes may also be [height, width], without the batch.
    **dict.fromkeys(
        ("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput"),
        (lambda call: call.shape(0) != [4], "has an input size of unknown length"),
    ),
    # The slices of rows would differ in size.
    "Slice": (lambda call: call.stacked[1] and _may_differ_in_size(call), "takes slices that may differ in size"),
    # In training, the op computes moments over all rows. In inference, the other results differ between devices.
    "FusedBatchNormV3": (
        lambda call: call.attribute("is_training") or any(call.uses(index) for index in range(1, 6)),
        "computes moments",
    ),
    "ResourceGather": (lambda call: bool(call.attribute("batch_dims")), "has batch_dims"),
}
"""Type of op -> which calls run row by row, and the reason."""


def why_not_vectorizable(op: Any, stacked: Sequence[bool]) -> str | None:
    """Return why a call of an op is not vectorised; `None` if it is.

    Args:
        op: `tf.Operation` of a function of one row.
        stacked: for each input, whether it differs between rows.
    """
    if op.type not in _WITH_LISTS and any(each.dtype == tf.variant for each in (*op.inputs, *op.outputs)):
        return "has an input or a result that is not a tensor"
    call = OpCall(op, stacked)
    if _may_exceed_kernel(call):
        return "may have more axes for all rows than its kernel accepts"
    repeated = () if op.type in ELEMENTWISE else op.inputs
    if any(each.dtype == tf.uint16 and not differs for each, differs in zip(repeated, stacked)):
        return NO_TILE
    refuses, words = EXCEPTIONS.get(op.type, (None, ""))
    return words if refuses is not None and refuses(call) else None


def is_control_flow(op: Any) -> bool:
    """Whether an op is a call, a loop or a branch, the body of which is converted op by op."""
    return op.type in CONTROL_FLOW


def runs_row_by_row(op: Any) -> bool:
    """Whether an op can run row by row inside a vectorised function."""
    # Python calls wait for each other, and an op with a seed draws its numbers in the order of its runs.
    if op.type in ("Merge", "PyFuncStateless", "Switch") or "seed" in op.node_def.attr:
        return False
    state = {each.dtype for each in (*op.inputs, *op.outputs)} & {tf.variant, tf.resource}
    return bool(op.outputs) and not (state or op.op_def.is_stateful or is_control_flow(op))
