"""Calls of TensorFlow ops, for hypothesis to draw: operands, attributes, which operands differ between rows, and placement.

`ops` registers signatures of ops; `calls_of` draws a call of an op. Each list of options begins with the plainest one, so that
the simplest call of an op has known lengths, stacked operands and no placement.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from tensorflow.python.framework import op_def_registry  # which inputs an op has, and which dtypes it takes

ROWS = 5
FLOATS = ("float32", "float64")
INTEGERS = ("int32", "int64")
DTYPES = ("float32", "int32", "float64", "int64", "complex64", "bool", "string")

Draw = Callable[[Any], Any]
Make = Callable[[Any, Sequence[int], str], Any]
"""`(random, shape, dtype)` makes values."""


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that an op takes."""

    values: Any
    """`[ROWS, ...]` if stacked, `[...]` otherwise."""

    source: str
    """`stacked`: differs between rows; `captured`: an eager tensor; `variable`: read in each row; `constant`: known."""

    unknown: tuple[bool, ...]
    """Which axes have a length that is not known when tracing."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape for one row."""
        return self.values.shape[1:] if self.source == "stacked" else self.values.shape

    @property
    def dtype(self) -> tf.DType:
        return tf.string if self.values.dtype == object else tf.as_dtype(self.values.dtype)

    @property
    def static_shape(self) -> list[int | None]:
        """The shape for one row when tracing."""
        return [None if unknown else length for unknown, length in zip(self.unknown, self.shape)]

    def __repr__(self) -> str:
        known = ", ".join("?" if length is None else str(length) for length in self.static_shape)
        value = f" {self.values[0] if self.source == 'stacked' else self.values}" if self.values.size < 9 * ROWS else ""
        return f"{self.source} {self.dtype.name}[{known}] {'x'.join(map(str, self.shape))}{value}".replace("\n", "")


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an op in a function of one row."""

    op: str
    """The type of the op."""

    arguments: dict[str, Any]
    """Its operands, lists of operands, and attributes."""

    function: Callable[..., Any]
    """Calls the op with these arguments."""

    placement: str = "plain"
    """A key of `PLACEMENTS`."""

    @property
    def operands(self) -> list[Operand]:
        flat = itertools.chain.from_iterable(a if isinstance(a, list) else [a] for a in self.arguments.values())
        return [argument for argument in flat if isinstance(argument, Operand)]

    def run(self, tensor_of: Callable[[Operand], Any]) -> list[Any]:
        """The results of one row."""

        def resolved(argument: Any) -> Any:
            if isinstance(argument, list):
                return [resolved(each) for each in argument]
            return tensor_of(argument) if isinstance(argument, Operand) else argument

        return [*tf.nest.flatten(self.function(**{name: resolved(each) for name, each in self.arguments.items()}))]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Let hypothesis print this as Python does."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())}) placed: {self.placement}"


# Placements: each takes a function that runs the call, and the number of the row.

Run = Callable[[], list[Any]]


def _zeros(run: Run) -> list[Any]:
    return [tf.zeros_like(result) for result in run()]


def _repeated(run: Run, steps: Any) -> list[Any]:
    step = lambda i, *_: (i + 1, *run())
    return list(tf.while_loop(lambda i, *_: i < steps, step, (0, *run()))[1:])


PLACEMENTS: dict[str, Callable[[Run, Any], list[Any]]] = {
    "plain": lambda run, row: run(),
    "in a tf.function": lambda run, row: run() if tf.executing_eagerly() else tf.function(run, autograph=False)(),
    "in a loop": lambda run, row: _repeated(run, 2),
    "in a loop that rows leave at different times": lambda run, row: _repeated(run, row % 3),
    "in a branch of some rows": lambda run, row: tf.cond(row % 2 == 0, run, lambda: _zeros(run)),
    "in a branch of no row": lambda run, row: tf.cond(row < 0, run, lambda: _zeros(run)),
    "in a case of some rows": lambda run, row: tf.switch_case(row % 3, [run, lambda: _zeros(run), run]),
}


# How a call is drawn

FEW, ANY_RANK = (1, 0, 2), (2, 1, 3, 0, 4)
RANKS = {"": (1,), "+": FEW, "^": FEW, "*": ANY_RANK, "~": ANY_RANK}


@dataclass(frozen=True)
class Signature:
    """Calls of an op that are alike. `ops` describes its parts."""

    inputs: Sequence[str] | Callable[[Drawing], None]
    function: Callable[..., Any] | None
    makes: dict[str, Make]
    attributes: dict[str, Any]

    def draw(self, draw: Draw, op: str) -> Call:
        """Draw a call, of which at least one operand is stacked if it has any."""
        drawing = Drawing(draw, op, self)
        if callable(self.inputs):
            self.inputs(drawing)
        else:
            tokens = drawing.choose(*self.inputs).split()
            if ":" not in tokens[0]:
                names = [name for name in arguments_of(op) if name not in self.attributes]
                shapes = tokens * len(names) if len(tokens) == 1 else tokens
                tokens = [f"{name}:{shape}" for name, shape in zip(names, shapes)]
            for token in tokens:
                drawing.add(*token.split(":"))
        for name, value in self.attributes.items():
            drawing.add_attribute(name, value)
        return Call(op, _with_a_stacked_one(drawing.arguments), self.function or getattr(tf.raw_ops, op))


class Drawing:
    """Draws the parts of one call, and knows the lengths, dtypes and values that several parts share."""

    def __init__(self, draw: Draw, op: str, signature: Signature) -> None:
        self.draw, self.op, self.signature = draw, op, signature
        self.axes: dict[str, list[int]] = {}
        self.dtypes: dict[str, str] = {}
        self.arguments: dict[str, Any] = {}
        self.values: dict[str, Any] = {}

    @property
    def first(self) -> tuple[int, ...]:
        """The shape of the first operand."""
        first = next(iter(self.arguments.values()))
        return (first[0] if isinstance(first, list) else first).shape

    @property
    def rank(self) -> int:
        return len(self.first)

    def choose(self, *options: Any) -> Any:
        """One of the options; the first one is the plainest."""
        return self.draw(st.sampled_from(options))

    def shape(self, text: str) -> list[int]:
        """The shape that `text` describes (see `ops`)."""
        return [length for axes in text.strip(".").split(",") if axes for length in self._lengths(axes)]

    def _lengths(self, axes: str) -> list[int]:
        if axes.isdigit():
            return [int(axes)]
        if axes == "?":
            return [self.choose(2, 1, 0, 3)]
        kind, name = axes[:-1], axes[-1]
        if name not in self.axes:
            lengths = (3, 2, 1) if name.isupper() else (3, 2, 1, 0)
            self.axes[name] = [self.choose(*lengths) for _ in range(self.choose(*RANKS[kind]))]
        whole = self.axes[name]
        if kind in ("", "+", "*"):
            return whole
        return [self.choose(length, length, 1) for length in whole[self.choose(0, *range(len(whole) + 1)) :]]

    def dtype(self, name: str) -> str:
        """The dtype of an input. Inputs with the same type attribute share it."""
        argument = arguments_of(self.op).get(name)
        if argument is not None and argument.type:
            return str(tf.as_dtype(argument.type).name)
        attribute = (argument.type_attr or argument.type_list_attr) if argument is not None else "T"
        if attribute not in self.dtypes:
            allowed = dtypes_of(self.op, attribute)
            wanted = self.signature.attributes.get(attribute, allowed)
            self.dtypes[attribute] = self.choose(*[dtype for dtype in wanted if dtype in allowed])
        return self.dtypes[attribute]

    def add(self, name: str, text: str) -> None:
        """Add an operand, or append some to a list of operands."""
        shape = text.lstrip("!=@")
        flags = text.removesuffix(shape)
        if not is_list(self.op, name):
            self.add_operand(name, self.shape(shape), flags)
            return
        for _ in range(self.choose(2, 1, 3) if "@" in flags else 1):
            self.arguments.setdefault(name, []).append(self.operand(name, self.shape(shape), flags))

    def add_operand(self, name: str, shape: Sequence[int], flags: str = "") -> None:
        self.arguments[name] = self.operand(name, shape, flags)

    def operand(self, name: str, shape: Sequence[int], flags: str) -> Operand:
        """A tensor of any source."""
        sources = ("captured", "stacked") if "!" in flags else ("stacked", "stacked", "stacked", "captured")
        source = self.choose(*sources, "variable", "constant")
        unknown = [False] * len(shape)
        if "=" not in flags and shape and source == "stacked":
            unknown = self.choose(*[unknown] * 7, [True] * len(shape), [True, *unknown[1:]], [*unknown[1:], True])
        make = self.signature.makes.get(name) or RANGES.get(self.op) or RANGES.get(name, ANY)
        random = np.random.default_rng(self.draw(st.integers(0, 999)))
        values = make(random, (*[ROWS][: source == "stacked"], *shape), self.dtype(name))
        return Operand(values, source, tuple(unknown))

    def add_attribute(self, name: str, value: Any, source: str = "") -> None:
        """Add an attribute, or an input that says how to compute: the same in all rows, and rarely unknown when tracing."""
        if name in dtype_attributes(self.op):
            return
        value = value(self) if callable(value) and not isinstance(value, tf.DType) else value
        value = self.choose(*value) if isinstance(value, tuple) else value
        self.values[name] = self.arguments[name] = value
        if name in arguments_of(self.op):
            source = source or self.choose(*["constant"] * 12, "captured", "variable", "stacked")
            values = np.asarray(value, self.dtype(name))
            values = np.repeat(values[None], ROWS, 0) if source == "stacked" else values
            self.arguments[name] = Operand(values, source, (False,) * np.ndim(value))

    def axis(self, rank: int) -> int:
        """An axis, from either end."""
        return int(self.choose(*range(rank), *range(-rank, 0)))

    def axes_of(self, rank: int, count: int) -> list[int]:
        """Different axes, each from either end, in any order."""
        order = self.draw(st.permutations(range(rank)))[:count]
        return [axis - rank if self.draw(st.booleans()) else axis for axis in order]


def _with_a_stacked_one(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments; the first operand is stacked if no other one is."""
    operands = Call("", arguments, tf.identity).operands
    if not operands or any(each.source == "stacked" for each in operands):
        return arguments
    first = operands[0]
    stacked = Operand(np.repeat(first.values[None], ROWS, 0), "stacked", first.unknown)
    replace = lambda each: stacked if each is first else each
    return {k: [*map(replace, v)] if isinstance(v, list) else replace(v) for k, v in arguments.items()}


RENAMED = {"reduction_indices": "axis", "split_dim": "axis", "dim": "axis"}
"""Names of inputs that `tf.raw_ops` calls otherwise."""


@functools.cache
def arguments_of(op: str) -> dict[str, Any]:
    """The inputs of an op, under their names in `tf.raw_ops`."""
    renamed = RENAMED | ({"t": "x", "e": "y"} if op == "Select" else {})
    return {renamed.get(each.name, each.name): each for each in op_def_registry.get(op).input_arg}


def is_list(op: str, name: str) -> bool:
    argument = arguments_of(op).get(name)
    return argument is not None and bool(argument.number_attr or argument.type_list_attr)


@functools.cache
def dtype_attributes(op: str) -> set[str]:
    """The names of attributes that are the dtypes of inputs."""
    return {each.type_attr or each.type_list_attr for each in arguments_of(op).values()} | {"T"}


NO_KERNEL = {
    **dict.fromkeys(("Inv", "Reciprocal", "RealDiv"), INTEGERS),
    **dict.fromkeys(("FloorDiv", "Round", "TruncateDiv"), ("complex64",)),
    "ConjugateTranspose": ("string",),  # ends the process
}
"""Dtypes that an op takes, but not on a CPU."""


@functools.cache
def dtypes_of(op: str, attribute: str) -> list[str]:
    """The dtypes that an attribute of an op allows, of those that people use."""
    lists = [each.allowed_values.list.type for each in op_def_registry.get(op).attr if each.name == attribute]
    allowed = {tf.as_dtype(dtype).name for types in lists for dtype in types} or {*DTYPES}
    return [dtype for dtype in DTYPES if dtype in allowed and dtype not in NO_KERNEL.get(op, ())]


CALLS: dict[str, list[Signature]] = {}


def ops(
    names: str,
    inputs: str | Sequence[str] | Callable[[Drawing], None],
    function: Callable[..., Any] | None = None,
    makes: dict[str, Make] | None = None,
    **attributes: Any,
) -> None:
    """Register a signature of ops.

    Args:
        names: types of ops.
        inputs: an operand for each input that is not an attribute, as `name:shape` or as `shape`. A single shape is that of all
            inputs. Several texts are alternatives; a function adds the operands itself. A shape is a list of axes: a number
            is a length; `n` is one length; `N` is a length that is not 0; `+s` has up to two axes; `*s` up to four; `^s` and
            `~s` broadcast to these; `?` is another length each time; `.` is a scalar. The same letter stands for the same
            lengths. `!` marks an operand that some ops only take for all rows, `=` one of known shape, `@` several operands
            of a list.
        function: called instead of the function in `tf.raw_ops`.
        makes: name of an input -> its values.
        attributes: attributes, and inputs that say how to compute. A tuple holds options; a function takes the `Drawing`.
    """
    texts = (inputs,) if isinstance(inputs, str) else inputs
    for name in names.split():
        CALLS.setdefault(name, []).append(Signature(texts, function, makes or {}, attributes))


@st.composite
def calls_of(draw: Draw, op: str) -> Call:
    """One call of an op, of which at least one operand is stacked if it has any."""
    call = draw(st.sampled_from(CALLS[op])).draw(draw, op)
    return Call(op, call.arguments, call.function, draw(st.sampled_from([*["plain"] * 16, *PLACEMENTS])))


# Values


def between(low: float, high: float) -> Make:
    """Makes numbers of a range; integers of them are at least 1 apart from zero if the range is."""

    def make(random: Any, shape: Sequence[int], dtype: str) -> Any:
        if dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        if dtype == "string":
            return np.asarray(random.choice(["", "a", "Some Text", "Zürich"], shape), object)
        if dtype.startswith(("int", "uint")):
            return random.integers(int(np.ceil(low)), max(int(high), int(np.ceil(low))) + 1, shape).astype(dtype)
        numbers = random.uniform(low, high, shape)
        if dtype.startswith("complex"):
            numbers = numbers + 1j * random.uniform(low, high, shape)
        return np.asarray(numbers, dtype)

    return make


ANY, POSITIVE, UNIT, ABOVE_ONE, PROBABILITY, INDEX = (
    between(*ends) for ends in ((-4.0, 4.0), (0.5, 3.0), (-0.9, 0.9), (1.1, 3.0), (0.1, 0.9), (0, 2))
)


whole = lambda random, shape, dtype: random.integers(1, 4, shape).astype(dtype)
numerals = lambda random, shape, dtype: np.asarray(random.integers(1000, 9999, shape)).astype(str).astype(object)
ordered = lambda random, shape, dtype: np.sort(ANY(random, shape, dtype), -1)


def different(random: Any, shape: Sequence[int], dtype: str) -> Any:
    """Different indices below 4."""
    return np.argsort(random.random((*shape[:-2], 4)))[..., : shape[-2], None].astype(dtype)


def well_conditioned(random: Any, shape: Sequence[int], dtype: str) -> Any:
    return ANY(random, shape, dtype) * 0.1 + np.diag(np.arange(2, shape[-1] + 2)).astype(dtype)


def positive_definite(random: Any, shape: Sequence[int], dtype: str) -> Any:
    matrix = well_conditioned(random, shape, dtype)
    return matrix @ np.conj(np.swapaxes(matrix, -1, -2))


factor = lambda random, shape, dtype: np.linalg.cholesky(positive_definite(random, shape, dtype))


def diagonals(random: Any, shape: Sequence[int], dtype: str) -> Any:
    return ANY(random, shape, dtype) * 0.1 + np.asarray([[0.0], [3.0], [0.0]], dtype)


VALUES: dict[Make, str] = {
    UNIT: "Acos Asin Atanh Erfinv",
    POSITIVE: "BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Digamma Div Expint FloorDiv FloorMod "
    "Igamma Igammac IgammaGradA Inv LeftShift Lgamma Log Log1p LRN LRNGrad Mod Polygamma Pow RealDiv Reciprocal ReciprocalGrad "
    "RightShift Rsqrt RsqrtGrad SigmoidGrad Spence Sqrt SqrtGrad TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy "
    "alpha rate reserve_space_2 variance",
    ABOVE_ONE: "Acosh Zeta",
    PROBABILITY: "AdjustContrastv2 AdjustHue AdjustSaturation Betainc HSVToRGB Ndtri RGBToHSV SoftmaxCrossEntropyWithLogits",
    INDEX: "indices labels targets",
    positive_definite: "Cholesky SelfAdjointEigV2",
    well_conditioned: "Eig LogMatrixDeterminant Lu MatrixDeterminant MatrixInverse MatrixLogarithm MatrixSquareRoot Qr Svd "
    "matrix",
    numerals: "StringToNumber DecodeBase64",
    between(0.0, 3.0): "Cast",
    between(-3, -1): "clip_value_min",
    between(1, 3): "clip_value_max",
    between(-1, 2): "segment_ids",
    between(-3, 3): "shift",
    ordered: "sorted_inputs",
    diagonals: "diagonals",
}
RANGES = {name: make for make, names in VALUES.items() for name in names.split()}
"""Values of the operands of an op, or of an input of any op."""

# Attributes


axis = lambda drawing: drawing.axis(drawing.rank)
new_axis = lambda drawing: drawing.axis(drawing.rank + 1)
first_axis = lambda drawing: drawing.choose(0, -drawing.rank)
last_axis = lambda drawing: drawing.choose(-1, drawing.rank - 1)
axes = lambda drawing: drawing.axes_of(drawing.rank, drawing.choose(*range(min(1, drawing.rank), drawing.rank + 1)))
complex_type = lambda drawing: tf.complex128 if drawing.dtypes["T"] == "float64" else tf.complex64
order = lambda drawing: [*drawing.draw(st.permutations(range(drawing.rank)))]
pads = lambda drawing: [[drawing.choose(1, 0), drawing.choose(0, 1)] for _ in drawing.first]
fft_lengths = lambda count, drawing: [drawing.choose(2, 3, length) for length in drawing.first[-count:]]


def axes_of_length_one(drawing: Drawing) -> list[int]:
    ones = [axis for axis, length in enumerate(drawing.first) if length == 1]
    return [axis - drawing.choose(0, drawing.rank) for axis in ones[: drawing.choose(1, 0, 2)]]


def target_shape(drawing: Drawing) -> list[int]:
    x, size = [*drawing.first], int(np.prod(drawing.first))
    return [*drawing.choose([size], x[::-1], [1, *x], [*x, 1], *[[-1], [1, -1]] * (size > 0))]


BOTH, EITHER = (False, True), (True, False)
PAIRS = (tf.int32, tf.int64)
NUMBERS = (*FLOATS, *INTEGERS)
MATRIX_TYPES, DIAGONAL_TYPES = ("float32", "float64", "complex64"), ("float32", "int32", "complex64")

# Elementwise

ops(
    "Abs Acos Acosh Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 "
    "BesselK1e BesselY0 BesselY1 Ceil Conj Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv Exp Expint Expm1 Floor FresnelCos "
    "FresnelSin Inv Invert IsFinite IsInf IsNan Lgamma Log Log1p LogicalNot Ndtri Neg Reciprocal Relu Relu6 Rint Round Rsqrt "
    "Selu Sigmoid Sign Sin Sinh Softplus Softsign Spence Sqrt Square Tan Tanh Identity StopGradient ZerosLike OnesLike Rank "
    "L2Loss PopulationCount PreventGradient Snapshot Angle ComplexAbs Imag Real",
    "*s",
)
ops("Size Shape", "*s", out_type=PAIRS)
ops(
    "Add AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor Div DivNoNan FloorDiv FloorMod Greater GreaterEqual Igamma "
    "Igammac IgammaGradA LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan Pow RealDiv RightShift "
    "SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta SelectV2",
    "~s",
)
ops("Complex", "~s", Tout=complex_type)
ops("Polygamma", "~s", makes={"a": whole})
ops("Betainc", ("*s *s *s", ". . *s", "*s *s ."), T=FLOATS)
ops("Equal NotEqual", "~s", incompatible_shape_error=EITHER)
ops("Equal NotEqual", ("2,3 3,2", "K,2 N,3"), incompatible_shape_error=False)
ops(
    "EluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad",
    "*s",
    T=FLOATS,
)
ops("LeakyRelu LeakyReluGrad", "*s", alpha=(0.2, 0.5), T=FLOATS)
ops("ApproximateEqual", "*s", tolerance=(1e-5, 2.0), T=FLOATS)
ops("CheckNumerics", "*s", message="text")
for source, targets in (
    ("float32", (tf.int32, tf.float64, tf.int64, tf.bool, tf.uint8, tf.bfloat16)),
    ("int32", (tf.float32, tf.int64, tf.complex64)),
    ("bool", (tf.float32, tf.int32)),
    ("float64", (tf.float32, tf.int32)),
    ("complex64", (tf.complex64, tf.bool)),
):
    ops("Cast", "*s", SrcT=(source,), DstT=targets, Truncate=BOTH)
ops("Bitcast", "*s", T=("float32",), type=(tf.int32, tf.uint8))
ops("Bitcast", "*s", T=("int64",), type=(tf.float64, tf.int32))
ops("ClipByValue", ("*s !. !.", "*s !*s !*s"), T=NUMBERS)
ops("Select", ("*s *s *s", "n n,+s n,+s", ". *s *s"))
ops("AddN IdentityN", "@*s", T=("float32", "int32"))
ops("ShapeN", "@*s", out_type=PAIRS)
ops("Bucketize", "*s", boundaries=([-1.0, 0.0, 2.0], [], [0.5]))

# Reductions, and along an axis

ops("All Any EuclideanNorm Max Mean Min Prod Sum", "*s", axis=axes, keep_dims=BOTH, T=NUMBERS)
ops("All Any Max Sum", "+s,n", axis=axis, keep_dims=BOTH)
ops("ArgMax ArgMin", "+s,N", dimension=axis, output_type=PAIRS[::-1], T=NUMBERS)
ops("CumulativeLogsumexp Cumprod Cumsum", "+s,n", axis=axis, exclusive=BOTH, reverse=BOTH, T=NUMBERS)
ops("ReverseV2", "*s", axis=axes)
ops("Roll", "input:+s,3 shift:.", axis=axis, T=FLOATS)
ops("Roll", "input:2,3,+s shift:=2", axis=lambda drawing: drawing.axes_of(drawing.rank, 2), T=FLOATS)
ops("LogSoftmax Softmax", "+s,n")
ops("TopKV2", "+s,3", k=(2, 1, 0), sorted=True, Tk=("int32",))  # TensorFlow gives k a gradient of int32
ops("InTopKV2", "predictions:n,4 targets:n", k=(2, 1))
ops("LowerBound UpperBound", "R,N R,c", out_type=PAIRS, T=NUMBERS)

# Shaping

ops("Reshape", "*s", shape=target_shape)
ops("ExpandDims", "*s", axis=new_axis)
ops("Squeeze", ("1,n", "n,1,+s,1", "*s"), axis=axes_of_length_one)
ops("Pack", "@+s", axis=new_axis)
ops("Unpack", "+s,N", axis=axis, num=lambda drawing: drawing.first[drawing.values["axis"]])
ops("ConcatV2", ("values:?,+s values:?,+s", "values:?,+s values:?,+s values:?,+s"), axis=first_axis)
ops("ConcatV2", ("values:+s,? values:+s,?"), axis=last_axis)
ops("ConcatV2", ("values:2,?,n values:2,?,n"), axis=(1, -2))
ops("Split", "value:+s,4", axis=last_axis, num_split=(2, 1, 4))
ops("Split", "value:4,+s", axis=first_axis, num_split=(2, 1, 4))
for sizes in ([1, 3], [4], [2, 0, 2], [1, -1]):
    ops("SplitV", "value:+s,4", size_splits=sizes, axis=last_axis, num_split=len(sizes))
    ops("SplitV", "value:4,+s", size_splits=sizes, axis=first_axis, num_split=len(sizes))
ops("Tile", "*s", multiples=lambda drawing: [drawing.choose(2, 1, 0) for _ in drawing.first])
ops("Pad", "+s,n", paddings=pads, T=("float32", "int32", "float64", "complex64"))
ops("PadV2", "input:+s,n constant_values:!.", paddings=pads, T=("float32", "int32", "complex64"))
ops("MirrorPad", ("3,2", "2", "2,3,3"), paddings=pads, mode=("REFLECT", "SYMMETRIC"), T=("float32", "int32"))
ops("Transpose", "*s", perm=order)
ops("ConjugateTranspose", "+s,n", perm=order)  # of a scalar, it ends the process
ops("BroadcastTo", "~s", shape=lambda drawing: drawing.axes["s"], T=("float32", "int32", "bool"))
ops("Fill", "value:.", dims=lambda drawing: drawing.shape("*s"))
ops("EnsureShape", "*s", shape=lambda drawing: [drawing.choose(length, None) for length in drawing.first])

# Slicing and gathering


def _strided_slice(drawing: Drawing) -> None:
    """Draw one bit of a mask for each entry: ellipsis, new axis, shrink, or a range with or without begin and end."""
    choose = drawing.choose
    x = drawing.shape(choose("M,N", "N", "M,N,+S", "+S"))
    masks = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0)
    entries, axis = [], 0
    for place in range(choose(*range(1, len(x) + 2))):
        kinds = ["range", "shrink_axis"] * (axis < len(x)) + ["new_axis", "ellipsis"]
        kind = choose(*kinds) if not masks["ellipsis_mask"] else "new_axis"
        length = x[axis] if axis < len(x) else 1
        entry = (0, length, 1)
        if kind == "range":
            entry = choose(entry, (1, length, 2), (0, -1, 1), (-1, length, 1), (0, 9, 2), (length, 0, -1), (-1, -9, -1))
            masks["begin_mask"] |= choose(0, 1) << place
            masks["end_mask"] |= choose(0, 1) << place
        else:
            masks[f"{kind}_mask"] |= 1 << place
        if kind == "shrink_axis":
            first = choose(0, -1, length - 1)
            entry = (first, first + 1, 1)
        axis += kind in ("range", "shrink_axis")
        entries.append(entry)
    parts = dict(zip(("begin", "end", "strides"), map(list, zip(*entries))))
    if drawing.op == "StridedSliceGrad":
        result = tf.raw_ops.StridedSlice(input=tf.zeros(x), **parts, **masks).shape
        drawing.add_operand("dy", [*result])
        drawing.add_attribute("shape", x)
    else:
        drawing.add_operand("input", x)
    source = choose(*["constant"] * 12, "variable", "stacked", "captured")
    for name, value in parts.items():
        drawing.add_attribute(name, value, "constant" if name == "strides" else source)
    for name, mask in masks.items():
        drawing.add_attribute(name, mask)


def _first_places(drawing: Drawing) -> list[int]:
    return [drawing.choose(*range(length + 1)) for length in drawing.first]


def _sizes_from_there(drawing: Drawing) -> list[int]:
    places = zip(drawing.first, drawing.values["begin"])
    return [drawing.choose(-1, *range(length - place + 1)) for length, place in places]


ops("StridedSlice StridedSliceGrad", _strided_slice, T=NUMBERS)
ops("StridedSlice", _strided_slice)
ops("Slice", "*s", begin=_first_places, size=_sizes_from_there)
ops("GatherV2", "params:3,+s indices:+i", axis=first_axis, batch_dims=0)
ops("GatherV2", "params:+s,3 indices:+i", axis=last_axis, batch_dims=0)
ops("GatherV2", "params:N,3,+s indices:N,i", axis=lambda d: d.choose(1, 1 - d.rank), batch_dims=(1, -1))
ops("GatherV2", "params:N,M,3 indices:N,M", axis=(2, -1), batch_dims=(1, -1))
ops("GatherNd", ("3,3 +i,2", "3,3,n +i,1", "3 n,1", "3,3 +i,0"))
ops("ScatterNd", "indices:K,1 updates:K,+s", makes={"indices": different}, shape=lambda d: [4, *d.axes["s"]], T=NUMBERS)
ops(
    "TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate",
    ("4,+s 2,1 2,+s", "4,+s n,1 n,+s"),
    makes={"indices": different},
    T=NUMBERS,
)
ops("OneHot", "indices:+i on_value:!. off_value:!.", depth=(3, 1, 0), axis=lambda d: d.choose(-1, *range(d.rank + 1)))
ops(
    "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum",
    "+i,+s +i",
    num_segments=(3, 4),
    T=NUMBERS,
)
SEGMENTS = ([0, 0, 1], [0, 2, 2], [0, 0, 0])
ops("SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum", "3,+s", segment_ids=SEGMENTS, T=NUMBERS)

# Matrices

for flip, other in itertools.product(BOTH, BOTH):
    left, right = "k,m" if flip else "m,k", "n,k" if other else "k,n"
    ops("MatMul", f"{left} {right}", transpose_a=flip, transpose_b=other, T=(*MATRIX_TYPES, "int32"))
    ops("BatchMatMul", f"+b,{left} +b,{right}", adj_x=flip, adj_y=other, T=(*MATRIX_TYPES, "int32"))
    ops("BatchMatMulV2", f"+b,{left} ^b,{right}", adj_x=flip, adj_y=other, T=(*MATRIX_TYPES, "int32"))
for (
    equation
) in "ij,jk->ik i,j->ij i,i-> ij->ji ii->i ij-> ij,ij->i abc,cd->abd *ij,jk->*ik i*,i->* ,i->i a,b->ba".split():
    terms = [",".join(each.upper()) or "." for each in equation.partition("->")[0].split(",")]
    operands = " ".join(f"inputs:{each.replace('*', '+z')}" for each in terms)
    ops("Einsum", operands, equation=equation.replace("*", "..."), T=MATRIX_TYPES)
ops("BiasAdd", "+s,n,C C", data_format="NHWC", T=FLOATS)
ops("BiasAdd", ("N,C,M,K C", "N,C,M C"), data_format="NCHW", T=FLOATS)
ops("BiasAddGrad", ("N,C,M,K", "N,C,M"), data_format=("NHWC", "NCHW"), T=FLOATS)
ops("Cross", "+s,3", T=NUMBERS)
ops("Cholesky LogMatrixDeterminant MatrixDeterminant", "+b,N,N", T=FLOATS)
ops("MatrixSquareRoot", "+B,N,N", T=FLOATS)  # the gradient of an empty batch ends the process
ops("MatrixLogarithm", "+b,N,N", T=("complex64",))
ops("MatrixInverse", "+b,N,N", adjoint=BOTH, T=FLOATS)
ops("Qr", "+b,N,N", full_matrices=BOTH, T=FLOATS)
ops("Lu", "+b,N,N", output_idx_type=PAIRS, T=FLOATS)
ops("Eig", "+b,N,N", compute_v=True, Tout=complex_type, T=FLOATS)
ops("SelfAdjointEigV2", "+b,N,N", compute_v=True, T=FLOATS)
ops("Svd", "+b,N,N", compute_uv=True, full_matrices=BOTH, T=FLOATS)
# Kernels leave the vectors uninitialised if they are not computed, and Eig gives them another shape than TensorFlow declares:
# gradients of it in a loop of the row fail.
eigenvalues = lambda **given: tf.stop_gradient(tf.raw_ops.Eig(**given)[0])
ops("Eig", "+b,N,N", eigenvalues, compute_v=False, Tout=complex_type, T=FLOATS)
ops("SelfAdjointEigV2", "+b,N,N", lambda **given: tf.raw_ops.SelfAdjointEigV2(**given)[0], compute_v=False, T=FLOATS)
ops("Svd", "+b,N,N", lambda **given: tf.raw_ops.Svd(**given)[0], compute_uv=False, T=FLOATS)
ops("MatrixSolve", "matrix:+b,N,N rhs:+b,N,k", adjoint=BOTH, T=MATRIX_TYPES)
ops("MatrixTriangularSolve", "matrix:+b,N,N rhs:^b,N,k", adjoint=BOTH, lower=EITHER, T=MATRIX_TYPES)
ops("CholeskyGrad", "+B,N,N", makes={"l": factor}, T=FLOATS)
ops("TridiagonalMatMul", "superdiag:+b,1,3 maindiag:+b,1,3 subdiag:+b,1,3 rhs:+b,3,2", T=FLOATS)
ops("TridiagonalSolve", "diagonals:+b,3,3 rhs:+b,3,2", partial_pivoting=EITHER, T=FLOATS)
ops("Diag", ("n", "n,m"), T=DIAGONAL_TYPES)
ops("DiagPart", ("n,n", "n,m,n,m"), T=DIAGONAL_TYPES)
ops("MatrixDiag", "+s,N", T=DIAGONAL_TYPES)
ops("MatrixDiagPart", "+s,N,M", T=DIAGONAL_TYPES)
ops("MatrixBandPart", "+s,N,M", num_lower=(0, 1, -1), num_upper=(0, 1, -1), T=DIAGONAL_TYPES)
ops("MatrixSetDiag", "+b,3,3 +b,3", T=DIAGONAL_TYPES)
ALIGN = ("RIGHT_LEFT", "LEFT_LEFT", "LEFT_RIGHT")
for k, shape in ((0, "3"), (1, "2"), (-1, "2"), ([-1, 0], "2,3"), ([0, 0], "3")):
    ops("MatrixSetDiagV3", f"input:+B,3,3 diagonal:+B,{shape}", k=k, align=ALIGN, T=DIAGONAL_TYPES)
    ops("MatrixDiagPartV3", "input:+B,3,3 padding_value:!.", k=k, align=ALIGN, T=DIAGONAL_TYPES)
    diagonal = f"diagonal:+B,{shape} padding_value:!."
    ops("MatrixDiagV3", diagonal, k=k, num_rows=(-1, 3), num_cols=(-1, 3), align=ALIGN, T=DIAGONAL_TYPES)
ops("FFT IFFT", "+s,N", Tcomplex=("complex64",))
ops("FFT2D IFFT2D", ("N,M", "K,N,M"), Tcomplex=("complex64",))
ops("FFT3D IFFT3D", ("K,N,M", "L,K,N,M"), Tcomplex=("complex64",))
for dimensions, shapes in (("", ("4", "N,3")), ("2D", ("4,3", "N,3,4")), ("3D", ("3,4,3", "N,4,3,3"))):
    lengths = partial(fft_lengths, int(dimensions[:1] or 1))
    ops(f"RFFT{dimensions}", shapes, fft_length=lengths, Treal=("float32",))
    ops(f"IRFFT{dimensions}", shapes, fft_length=lengths, Tcomplex=("complex64",))

# Convolutions, pools and images


def _max_pool_grad(op: str, orig_input: Any, grad: Any, **windows: Any) -> Any:
    given = {"orig_input": orig_input, "grad": grad, **windows}
    pool = getattr(tf.raw_ops, op.replace("Grad", ""))
    return getattr(tf.raw_ops, op)(orig_output=pool(input=orig_input, **windows), **given)


for stride, padding, length in ((1, "SAME", 5), (2, "SAME", 3), (1, "VALID", 4), (2, "VALID", 2)):
    image, pooled = "2,5,5,2", f"2,{length},{length}"
    size, windows = [2, 5, 5, 2], {"strides": [1, stride, stride, 1], "padding": padding, "T": FLOATS}
    ops("Conv2D", f"{image} !2,2,2,3", **windows, dilations=[1, 1, 1, 1])
    ops("Conv2DBackpropInput", f"filter:!2,2,2,3 out_backprop:{pooled},3", input_sizes=size, **windows)
    ops("Conv2DBackpropFilter", f"input:{image} out_backprop:{pooled},3", filter_sizes=[2, 2, 2, 3], **windows)
    depthwise = "DepthwiseConv2dNative"
    ops(depthwise, f"{image} !2,2,2,2", **windows)
    ops(f"{depthwise}BackpropInput", f"filter:!2,2,2,2 out_backprop:{pooled},4", input_sizes=size, **windows)
    ops(f"{depthwise}BackpropFilter", f"input:{image} out_backprop:{pooled},4", filter_sizes=[2, 2, 2, 2], **windows)
    windows |= {"T": ("float32",), "ksize": [1, 2, 2, 1]}
    ops("AvgPool MaxPool MaxPoolV2", image, **windows)
    ops("AvgPoolGrad", f"grad:{pooled},2", orig_input_shape=size, **windows)
    for op in ("MaxPoolGrad", "MaxPoolGradV2"):
        ops(op, f"orig_input:{image} grad:{pooled},2", partial(_max_pool_grad, op), **windows)
    image, pooled = "1,5,5,5,2", f"1,{length},{length},{length}"
    size, windows = [1, 5, 5, 5, 2], {"strides": [1, stride, stride, stride, 1], "padding": padding, "T": FLOATS}
    ops("Conv3D", f"{image} !2,2,2,2,3", **windows)
    ops("Conv3DBackpropInputV2", f"filter:!2,2,2,2,3 out_backprop:{pooled},3", input_sizes=size, **windows)
    windows |= {"T": ("float32",), "ksize": [1, 2, 2, 2, 1]}
    ops("AvgPool3D MaxPool3D", image, **windows)
    ops("AvgPool3DGrad", f"grad:{pooled},2", orig_input_shape=size, **windows)
    gradient = partial(_max_pool_grad, "MaxPool3DGrad")
    ops("MaxPool3DGrad", f"orig_input:{image} grad:{pooled},2", gradient, TInput=("float32",), **windows)
ops("Conv2D", "2,5,5,2 !2,2,2,3", strides=[1, 1, 1, 1], padding=("SAME", "VALID"), dilations=[1, 2, 2, 1], T=FLOATS)


def _normalized(**given: Any) -> Any:
    """What inference returns besides the first result is reserved for gradients."""
    return tf.raw_ops.FusedBatchNormV3(**given)[: 3 if given["is_training"] else 1]


def _normalized_grad(**given: Any) -> Any:
    """Its gradient is not taken: TensorFlow declares another shape of the last results than its kernel returns."""
    return tf.stop_gradient(tf.raw_ops.FusedBatchNormGradV3(**given)[0])


TYPES = {"T": ("float32",), "U": ("float32",)}
for image in ("2,5,5,2", "1,4,5,2"):
    ops("FusedBatchNormV3", f"{image} !=2 !=2 !=2 !=2", _normalized, is_training=False, **TYPES)
    ops("FusedBatchNormV3", f"{image} !=2 !=2 !=0 !=0", _normalized, is_training=True, **TYPES)
    ops("FusedBatchNormGradV3", f"{image} {image} !=2 !=2 !=2 !=0", _normalized_grad, is_training=BOTH, **TYPES)
    windows = {"strides": ([1, 1, 1, 1], [1, 2, 2, 1]), "padding": ("SAME", "VALID")}
    ops("Dilation2D", f"{image} !2,2,2", **windows, rates=[1, 1, 1, 1], T=("float32",))
    rates = ([1, 1, 1, 1], [1, 1, 2, 1])
    ops("ExtractImagePatches", image, **windows, ksizes=[1, 2, 2, 1], rates=rates, T=(*FLOATS, "int32"))
ops("LRN LRNGrad", "N,5,4,4", depth_radius=(1, 2), T=("float32",))
ops("DepthToSpace SpaceToDepth", "N,4,2,4", block_size=2, T=("float32", "int32"))
for ends in ([[0, 0], [0, 0]], [[0, 0], [1, 1]]):
    ops("BatchToSpaceND", ("4,2,4", "4,4,2,n"), block_shape=[2, 2], crops=ends, T=NUMBERS)
    ops("SpaceToBatchND", ("N,2,2", "n,4,2,m"), block_shape=[2, 2], paddings=ends, T=NUMBERS)
SIZES, HALVES = ([3, 6], [2, 2]), {"align_corners": BOTH, "half_pixel_centers": EITHER}
ops("ResizeArea", "N,5,4,2", size=SIZES, align_corners=BOTH, T=("float32", "float64", "int32"))
ops(
    "ResizeBicubic ResizeBilinear ResizeNearestNeighbor",
    "N,5,4,2",
    size=SIZES,
    **HALVES,
    T=("float32", "float64", "int32"),
)
ops("ResizeBicubicGrad ResizeBilinearGrad", "N,3,6,2 N,5,4,2", **HALVES, T=("float32",))
ops("ResizeNearestNeighborGrad", "N,3,6,2", size=[5, 4], **HALVES, T=("float32",))
ops("AdjustContrastv2 AdjustHue AdjustSaturation", ("2,2,3 !.", "N,2,3,3 !."), T=("float32",))
ops("HSVToRGB RGBToHSV", "+s,3", T=("float32",))
ops("SoftmaxCrossEntropyWithLogits", ("n,C n,C", "n,C 1,C", "n,C n,1"), T=FLOATS)
ops("SparseSoftmaxCrossEntropyWithLogits", "n,3 n", T=FLOATS)

# Strings, tables and variables

ops("DecodeBase64 StringStrip", "*s")
ops("EncodeBase64", "*s", pad=BOTH)
ops("StaticRegexFullMatch", "*s", pattern=("a.*", "[A-Z].*"))
ops("StaticRegexReplace", "*s", pattern="e", rewrite="ee", replace_global=EITHER)
ops("StringLength", "*s", unit=("BYTE", "UTF8_CHAR"))
ops("StringLower StringUpper", "*s", encoding=("", "utf-8"))
ops("StringToHashBucket StringToHashBucketFast", "*s", num_buckets=(7, 99))
ops("StringToHashBucketStrong", "*s", num_buckets=(7, 99), key=[1, 2])
ops("StringToNumber", "*s", out_type=(tf.float32, tf.int64))
ops("AsString", "*s", T=("float32", "int32", "bool"))
ops("StringJoin", ("@*s", "inputs:. inputs:*s"), separator=("", "-"))
ops("ReduceJoin", "inputs:+s,N", tf.strings.reduce_join, axis=axis, keepdims=EITHER, separator=("", "-"))
ops("Substr", "input:*s", pos=(0, 1, -1), len=(1, 2), unit=("BYTE", "UTF8_CHAR"), makes={"input": numerals})
ops("Substr", "input:+s pos:+s len:+s", makes={"input": numerals, "pos": INDEX, "len": INDEX}, T=("int32",))
ops(
    "DecodeCSV",
    "records:*s",
    lambda records: tf.raw_ops.DecodeCSV(records=records, record_defaults=[[0], [""]]),
    makes={"records": lambda *drawn: np.asarray(numerals(*drawn) + ",text", object)},
)


@functools.cache
def _table() -> Any:
    known = tf.lookup.KeyValueTensorInitializer(["a", "Some Text"], tf.constant([1, 2], tf.int64))
    return tf.lookup.StaticHashTable(known, -1)


@functools.cache
def _variable() -> tf.Variable:
    return tf.Variable(ANY(np.random.default_rng(0), [3, 3], "float32"))


def _read(indices: Any, batch_dims: int) -> Any:
    handle = _variable().handle
    return tf.raw_ops.ResourceGather(resource=handle, indices=indices, dtype=tf.float32, batch_dims=batch_dims)


def _read_elements(indices: Any) -> Any:
    return tf.raw_ops.ResourceGatherNd(resource=_variable().handle, indices=indices, dtype=tf.float32)


def _asserted(x: Any) -> Any:
    with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.reduce_all(x < 9), data=[x])]):
        return tf.identity(x)


ops("LookupTableFindV2", "keys:+s", lambda keys: _table().lookup(keys), Tin=("string",))
ops("LookupTableSizeV2", "keys:+s", lambda keys: _table().size())
ops("ResourceGatherNd", ("indices:+i,1", "indices:n,2"), _read_elements)
ops("ResourceGather", "indices:+i", _read, batch_dims=0)
ops("ResourceGather", "indices:3,i", _read, batch_dims=1)
ops("Assert", "x:*s", _asserted, T=("float32",))

# Lists of tensors


def _list(op: str, x: Any, element: Any) -> Any:
    """Make a list of the three elements of a tensor, and run an op on it."""
    raw, shape = tf.raw_ops, tf.constant(element.shape.as_list(), tf.int32)
    handle = raw.TensorListFromTensor(tensor=x, element_shape=shape)
    reading = {"element_shape": shape, "element_dtype": element.dtype}
    if op == "TensorListGetItem":
        return raw.TensorListGetItem(input_handle=handle, index=1, **reading)
    if op == "TensorListGather":
        return raw.TensorListGather(input_handle=handle, indices=[2, 0], **reading)
    if op == "TensorListLength":
        return raw.TensorListLength(input_handle=handle)
    if op == "TensorListElementShape":
        return raw.TensorListElementShape(input_handle=handle, shape_type=tf.int32)
    if op == "TensorListPopBack":
        handle, last = raw.TensorListPopBack(input_handle=handle, **reading)
        return [last, raw.TensorListStack(input_handle=handle, **reading)]
    if op == "TensorListPushBack":
        handle = raw.TensorListPushBack(input_handle=handle, tensor=element)
    if op == "TensorListSetItem":
        handle = raw.TensorListSetItem(input_handle=handle, index=1, item=element)
    if op == "TensorListScatterIntoExistingList":
        both = tf.stack([element, element])
        handle = raw.TensorListScatterIntoExistingList(input_handle=handle, tensor=both, indices=[2, 0])
    return raw.TensorListStack(input_handle=handle, **reading)


for (
    end
) in "FromTensor Stack GetItem Gather PopBack Length ElementShape PushBack SetItem ScatterIntoExistingList".split():
    name = f"TensorList{end}"
    ops(name, "x:=3,+s element:=+s", partial(_list, name), T=("float32", "int32", "bool", "string"))


def _written(element: Any, places: Sequence[int], grows: bool) -> Any:
    array = tf.TensorArray(element.dtype, 0 if grows else 3, grows, element_shape=element.shape)
    for place in places:
        array = array.write(place, element)
    return array.stack()


ops("TensorListReserve", "element:=+s", _written, places=([0, 1, 2], [2, 0], [1]), grows=BOTH, T=("float32", "int32"))

# Random numbers

SEEDED: dict[str, Callable[..., Any]] = {
    "StatelessRandomNormalV2": tf.random.stateless_normal,
    "StatelessRandomUniformFullIntV2": partial(tf.random.stateless_uniform, minval=None, maxval=None),
    "StatelessRandomUniformIntV2": partial(tf.random.stateless_uniform, minval=-3, maxval=9),
    "StatelessRandomUniformV2": tf.random.stateless_uniform,
    "StatelessTruncatedNormalV2": tf.random.stateless_truncated_normal,
}
SHAPES = ([2, 3], [], [0], [3, 1, 2])
for name, function in SEEDED.items():
    dtypes = PAIRS if "Int" in name else (tf.float32, tf.float64)
    ops(name, "seed:=2", function, makes={"seed": INDEX}, shape=SHAPES, dtype=dtypes, T=("int32",))


def _random(op: str, x: Any, **arguments: Any) -> Any:
    """The numbers of two calls differ: only their shape and dtype can be compared."""
    numbers = getattr(tf.raw_ops, op)(**arguments)
    return tf.zeros_like(numbers) + tf.cast(tf.zeros_like(x), numbers.dtype)


for name in ("RandomStandardNormal", "RandomUniform", "TruncatedNormal"):
    ops(name, "x:.", partial(_random, name), shape=SHAPES, dtype=tf.float32, T=INTEGERS)
ops("RandomUniformInt", "x:.", partial(_random, "RandomUniformInt"), shape=SHAPES, minval=0, maxval=9, T=INTEGERS)
for name, inputs, size in (
    ("Multinomial", "logits:2,3", {"num_samples": 2}),
    ("RandomGamma", "alpha:2", {"shape": SHAPES}),
    ("RandomPoissonV2", "rate:2", {"shape": SHAPES, "R": ("float32",)}),
):
    run = lambda name=name, **arguments: tf.zeros_like(getattr(tf.raw_ops, name)(**arguments))
    ops(name, inputs, run, **size, T=("float32",))

RUNS_ROW_BY_ROW = frozenset(
    {*SEEDED, "Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "FusedBatchNormGradV3"}
)
"""Ops that are not in the table: each runs row by row alone."""
