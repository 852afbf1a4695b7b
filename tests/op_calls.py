"""Calls of TensorFlow ops, for hypothesis to draw: operands, attributes, which operands differ between rows, and placement.

`CALLS` maps the type of an op to a function that draws one call of it. Each sampled list begins with the plainest value, so
that the simplest call of an op has known lengths, stacked operands and no placement.
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


SHARED = "captured stacked variable constant"
"""Sources of an operand of which some ops take only one for all rows."""


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


@st.composite
def calls_of(draw: Draw, op: str) -> Call:
    """One call of an op, of which at least one operand is stacked if it has any."""
    call = CALLS[op](draw, op)
    return Call(call.op, call.arguments, call.function, draw(st.sampled_from([*["plain"] * 16, *PLACEMENTS])))


# Parts of calls


def choose(draw: Draw, *options: Any) -> Any:
    """One of the options; the first one is the plainest."""
    return draw(st.sampled_from(options))


def shape(draw: Draw, ranks: Sequence[int] = (2, 1, 3, 0, 4), lengths: Sequence[int] = (3, 2, 1, 0)) -> list[int]:
    """A shape for one row."""
    rank = choose(draw, *ranks)
    return [choose(draw, *lengths) for _ in range(rank)]


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


ANY, POSITIVE, UNIT, ABOVE_ONE, PROBABILITY = (
    between(*ends) for ends in ((-4.0, 4.0), (0.5, 3.0), (-0.9, 0.9), (1.1, 3.0), (0.1, 0.9))
)


def operand(
    draw: Draw, shape: Sequence[int], dtype: str = "float32", make: Make = ANY, sources: str = "", known: bool = False
) -> Operand:
    """A tensor of any source; with `known`, all lengths are known when tracing."""
    source = choose(draw, *(sources or "stacked stacked stacked captured variable constant").split())
    hidden = [False] * len(shape)
    if not known and shape and source == "stacked":
        hidden = choose(draw, *[hidden] * 7, [True] * len(shape), [True, *hidden[1:]], [*hidden[1:], True])
    random = np.random.default_rng(draw(st.integers(0, 999)))
    return Operand(make(random, (*[ROWS][: source == "stacked"], *shape), dtype), source, tuple(hidden))


def parameter(draw: Draw, value: Any, dtype: str = "int32", source: str = "") -> Operand:
    """A tensor that says how to compute: the same in all rows, and rarely only known when it runs."""
    source = source or choose(draw, *["constant"] * 12, "captured", "variable", "stacked")
    values = np.asarray(value, dtype)
    if source == "stacked":
        values = np.repeat(values[None], ROWS, 0)
    return Operand(values, source, (False,) * np.ndim(value))


def axis_of(draw: Draw, rank: int) -> int:
    """An axis, from either end."""
    return choose(draw, *range(rank), *range(-rank, 0))


def axes_of(draw: Draw, rank: int, least: int = 0) -> list[int]:
    """Different axes, each from either end, in any order."""
    count = choose(draw, *range(min(1, rank), rank + 1), least)
    return [axis - rank if draw(st.booleans()) else axis for axis in draw(st.permutations(range(rank)))[:count]]


def broadcast(draw: Draw, shape: Sequence[int]) -> list[int]:
    """A shape that broadcasts to the other one."""
    kept = shape[choose(draw, 0, *range(len(shape) + 1)) :]
    return [choose(draw, length, length, 1) for length in kept]


def call(op: str, function: Callable[..., Any] | None = None, **arguments: Any) -> Call:
    """A call of `tf.raw_ops.<op>`, or of a function that runs this op; the first operand is stacked if no other one is."""
    made = Call(op, arguments, function or getattr(tf.raw_ops, op))
    if made.operands and all(each.source != "stacked" for each in made.operands):
        first = made.operands[0]
        stacked = Operand(np.repeat(first.values[None], ROWS, 0), "stacked", first.unknown)
        replace = lambda each: stacked if each is first else each
        changed = {k: [*map(replace, v)] if isinstance(v, list) else replace(v) for k, v in arguments.items()}
        made = Call(op, changed, made.function)
    return made


@functools.cache
def inputs_of(op: str) -> list[str]:
    """The names of the inputs of an op."""
    return [argument.name for argument in op_def_registry.get(op).input_arg]


NO_KERNEL = {
    **dict.fromkeys(("Inv", "Reciprocal", "RealDiv"), INTEGERS),
    **dict.fromkeys(("FloorDiv", "TruncateDiv"), ("complex64",)),
}
"""Dtypes that an op takes, but not on a CPU."""


@functools.cache
def dtypes_of(op: str) -> list[str]:
    """The dtypes that an op takes, of those that people use; `bool` if it leaves no choice."""
    for each in op_def_registry.get(op).attr:
        if each.name == "T":
            allowed = {tf.as_dtype(dtype).name for dtype in each.allowed_values.list.type} or {*DTYPES}
            return [dtype for dtype in DTYPES if dtype in allowed and dtype not in NO_KERNEL.get(op, ())]
    return ["bool"]


CALLS: dict[str, Callable[[Draw, str], Call]] = {}


def family(ops: str) -> Callable[[Callable[[Draw, str], Call]], Callable[[Draw, str], Call]]:
    """Register a function that draws calls of these ops."""

    def register(draw_call: Callable[[Draw, str], Call]) -> Callable[[Draw, str], Call]:
        CALLS.update(dict.fromkeys(ops.split(), draw_call))
        return draw_call

    return register


# Elementwise

RANGES: dict[str, Make] = {
    **dict.fromkeys("Acos Asin Atanh Erfinv".split(), UNIT),
    **dict.fromkeys("Log Log1p Sqrt Rsqrt Lgamma Digamma Inv Reciprocal Spence Expint".split(), POSITIVE),
    **dict.fromkeys("BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 BesselJ0 BesselJ1".split(), POSITIVE),
    **dict.fromkeys(
        "Div RealDiv FloorDiv FloorMod Mod TruncateDiv TruncateMod Xdivy Xlogy Igamma Igammac".split(), POSITIVE
    ),
    **dict.fromkeys("IgammaGradA Pow LeftShift RightShift Xlog1py".split(), POSITIVE),
    **dict.fromkeys("ReciprocalGrad RsqrtGrad SqrtGrad SigmoidGrad TanhGrad".split(), POSITIVE),
    "Acosh": ABOVE_ONE,
    "Zeta": ABOVE_ONE,
    "Ndtri": PROBABILITY,
    "Betainc": PROBABILITY,
}


@family(
    "Abs Acos Acosh Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 "
    "BesselK1e BesselY0 BesselY1 Ceil Conj Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv Exp Expint Expm1 Floor FresnelCos "
    "FresnelSin Inv Invert IsFinite IsInf IsNan Lgamma Log Log1p LogicalNot Ndtri Neg Reciprocal Relu Relu6 Rint Round Rsqrt "
    "Selu Sigmoid Sign Sin Sinh Softplus Softsign Spence Sqrt Square Tan Tanh Identity StopGradient ZerosLike OnesLike Rank "
    "Size Shape L2Loss PopulationCount PreventGradient Snapshot"
)
def _unary(draw: Draw, op: str) -> Call:
    (name,) = inputs_of(op)
    attributes = {"out_type": choose(draw, tf.int32, tf.int64)} if op in ("Size", "Shape") else {}
    return call(
        op, **{name: operand(draw, shape(draw), choose(draw, *dtypes_of(op)), RANGES.get(op, ANY))}, **attributes
    )


@family("Angle ComplexAbs Imag Real")
def _of_complex(draw: Draw, op: str) -> Call:
    return call(op, **{inputs_of(op)[0]: operand(draw, shape(draw), "complex64")})


@family(
    "Add AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan FloorDiv FloorMod Greater GreaterEqual Igamma "
    "Igammac IgammaGradA LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan Pow RealDiv RightShift "
    "SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta"
)
def _binary(draw: Draw, op: str) -> Call:
    dtype, whole, make = choose(draw, *dtypes_of(op)), shape(draw), RANGES.get(op, ANY)
    shapes = draw(st.permutations([whole, broadcast(draw, whole)]))
    attributes = {"Tout": tf.complex64 if dtype == "float32" else tf.complex128} if op == "Complex" else {}
    return call(op, **{n: operand(draw, s, dtype, make) for n, s in zip(inputs_of(op), shapes)}, **attributes)


@family("Polygamma")
def _polygamma(draw: Draw, op: str) -> Call:
    order = between(1, 3)
    whole = lambda random, shape, dtype: order(random, shape, "int32").astype(dtype)
    x = shape(draw)
    return call(op, a=operand(draw, broadcast(draw, x), make=whole), x=operand(draw, x, make=POSITIVE))


@family("Equal NotEqual")
def _equality(draw: Draw, op: str) -> Call:
    dtype, x = choose(draw, *DTYPES), shape(draw)
    y = broadcast(draw, x)
    strict = choose(draw, True, False)
    return call(op, x=operand(draw, x, dtype), y=operand(draw, y, dtype), incompatible_shape_error=strict)


@family(
    "EluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad "
    "TanhGrad LeakyRelu LeakyReluGrad ApproximateEqual Betainc CheckNumerics"
)
def _of_one_shape(draw: Draw, op: str) -> Call:
    attributes = {
        "LeakyRelu": {"alpha": choose(draw, 0.2, 0.5)},
        "LeakyReluGrad": {"alpha": choose(draw, 0.2, 0.5)},
        "ApproximateEqual": {"tolerance": choose(draw, 1e-5, 2.0)},
        "CheckNumerics": {"message": "text"},
    }
    x, dtype, make = shape(draw), choose(draw, *FLOATS), RANGES.get(op, ANY)
    return call(op, **{name: operand(draw, x, dtype, make) for name in inputs_of(op)}, **attributes.get(op, {}))


@family("Cast")
def _cast(draw: Draw, op: str) -> Call:
    source, target = choose(draw, *DTYPES[:-1]), choose(draw, *DTYPES[:-1], "uint8", "bfloat16")
    if source == "complex64" and target != "bool":
        target = source
    make = POSITIVE if target == "uint8" else ANY
    return call(
        op, x=operand(draw, shape(draw), source, make), DstT=tf.as_dtype(target), Truncate=choose(draw, False, True)
    )


@family("Bitcast")
def _bitcast(draw: Draw, op: str) -> Call:
    source, target = choose(draw, ("float32", "int32"), ("int64", "float64"), ("float32", "uint8"), ("int64", "int32"))
    return call(op, input=operand(draw, shape(draw), source), type=tf.as_dtype(target))


@family("ClipByValue")
def _clip(draw: Draw, op: str) -> Call:
    x, dtype = shape(draw), choose(draw, *FLOATS, *INTEGERS)
    low, high = (
        operand(draw, x if choose(draw, False, True) else [], dtype, between(*ends), SHARED)
        for ends in ((-3, -1), (1, 3))
    )
    return call(op, t=operand(draw, x, dtype), clip_value_min=low, clip_value_max=high)


@family("Select SelectV2")
def _select(draw: Draw, op: str) -> Call:
    x, dtype = shape(draw), choose(draw, *DTYPES)
    if op == "Select":
        condition = choose(draw, x, x[:1], [])
        return call(
            op, condition=operand(draw, condition, "bool"), x=operand(draw, x, dtype), y=operand(draw, x, dtype)
        )
    condition, t, e = draw(st.permutations([x, broadcast(draw, x), broadcast(draw, x)]))
    return call(op, condition=operand(draw, condition, "bool"), t=operand(draw, t, dtype), e=operand(draw, e, dtype))


@family("AddN IdentityN ShapeN")
def _several(draw: Draw, op: str) -> Call:
    x, dtype = shape(draw), choose(draw, "float32", "int32")
    values = [operand(draw, x, dtype) for _ in range(choose(draw, 2, 1, 3))]
    return call(op, **{inputs_of(op)[0]: values})


@family("Bucketize")
def _bucketize(draw: Draw, op: str) -> Call:
    x = operand(draw, shape(draw), choose(draw, *FLOATS, *INTEGERS))
    return call(op, input=x, boundaries=choose(draw, [-1.0, 0.0, 2.0], [], [0.5]))


# Reductions, and along an axis


@family("All Any EuclideanNorm Max Mean Min Prod Sum")
def _reduction(draw: Draw, op: str) -> Call:
    x = shape(draw)
    axis = parameter(draw, axes_of(draw, len(x)), choose(draw, *INTEGERS))
    if x and choose(draw, False, True):
        axis = parameter(draw, axis_of(draw, len(x)))
    dtype = choose(draw, *[dtype for dtype in dtypes_of(op) if dtype != "string"])
    return call(op, input=operand(draw, x, dtype), axis=axis, keep_dims=choose(draw, False, True))


@family("ArgMax ArgMin")
def _arg(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3, 4), (3, 2, 1))
    axis = parameter(draw, axis_of(draw, len(x)))
    output = choose(draw, tf.int64, tf.int32)
    return call(op, input=operand(draw, x, choose(draw, *FLOATS, *INTEGERS)), dimension=axis, output_type=output)


@family("CumulativeLogsumexp Cumprod Cumsum")
def _scan(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3, 4))
    flags = {"exclusive": choose(draw, False, True), "reverse": choose(draw, False, True)}
    dtype = choose(draw, *(FLOATS if op == "CumulativeLogsumexp" else (*FLOATS, *INTEGERS)))
    return call(op, x=operand(draw, x, dtype), axis=parameter(draw, axis_of(draw, len(x))), **flags)


@family("ReverseV2")
def _reverse(draw: Draw, op: str) -> Call:
    x = shape(draw)
    return call(op, tensor=operand(draw, x, choose(draw, *DTYPES)), axis=parameter(draw, axes_of(draw, len(x))))


@family("Roll")
def _roll(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3))
    axes: Any = axes_of(draw, len(x), least=1)
    shift = between(-3, 3)
    if choose(draw, False, True):
        return call(
            op,
            input=operand(draw, x),
            shift=operand(draw, [len(axes)], "int32", shift, known=True),
            axis=parameter(draw, axes),
        )
    axis = parameter(draw, axes[0])
    return call(op, input=operand(draw, x), shift=operand(draw, [], "int32", shift), axis=axis)


@family("LogSoftmax Softmax")
def _softmax(draw: Draw, op: str) -> Call:
    return call(op, logits=operand(draw, shape(draw, (2, 1, 3, 4)), choose(draw, *FLOATS)))


@family("TopKV2")
def _top_k(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3), (3, 2))
    k = parameter(draw, choose(draw, 2, 1, 0))
    return call(op, input=operand(draw, x, choose(draw, *FLOATS, *INTEGERS)), k=k, sorted=True)


@family("InTopKV2")
def _in_top_k(draw: Draw, op: str) -> Call:
    rows = choose(draw, 3, 1, 0)
    targets = operand(draw, [rows], "int32", between(0, 3))
    return call(op, predictions=operand(draw, [rows, 4]), targets=targets, k=parameter(draw, choose(draw, 2, 1)))


@family("LowerBound UpperBound")
def _search(draw: Draw, op: str) -> Call:
    dtype = choose(draw, *FLOATS, *INTEGERS)
    ordered = lambda random, shape, dtype: np.sort(ANY(random, shape, dtype), -1)
    rows, length, count = (choose(draw, *lengths) for lengths in ((2, 1), (3, 1), (2, 3, 0)))
    found = operand(draw, [rows, length], dtype, ordered)
    output = choose(draw, tf.int32, tf.int64)
    return call(op, sorted_inputs=found, values=operand(draw, [rows, count], dtype), out_type=output)


# Shaping


@family("Reshape")
def _reshape(draw: Draw, op: str) -> Call:
    x = shape(draw)
    size = int(np.prod(x))
    targets = [[size], x[::-1], [1, *x], [*x, 1]] + [[-1], [1, -1]] * (size > 0)
    target = parameter(draw, choose(draw, *targets), choose(draw, *INTEGERS))
    return call(op, tensor=operand(draw, x, choose(draw, *DTYPES)), shape=target)


@family("ExpandDims")
def _expand(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3, 0))
    axis = parameter(draw, axis_of(draw, len(x) + 1))
    return call(op, input=operand(draw, x, choose(draw, *DTYPES)), axis=axis)


@family("Squeeze")
def _squeeze(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 3, 1, 0), (1, 3, 1, 0))
    ones = [axis for axis, length in enumerate(x) if length == 1]
    axes = [axis - len(x) if draw(st.booleans()) else axis for axis in ones[: choose(draw, 1, 0, 2)]]
    return call(op, input=operand(draw, x, choose(draw, *DTYPES)), axis=axes)


@family("Pack")
def _pack(draw: Draw, op: str) -> Call:
    x, dtype = shape(draw, (2, 1, 0, 3)), choose(draw, *DTYPES)
    values = [operand(draw, x, dtype) for _ in range(choose(draw, 2, 1, 3))]
    return call(op, values=values, axis=axis_of(draw, len(x) + 1))


@family("Unpack")
def _unpack(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3), (3, 2, 1))
    axis = axis_of(draw, len(x))
    return call(op, value=operand(draw, x, choose(draw, *DTYPES)), num=x[axis], axis=axis)


@family("ConcatV2")
def _concat(draw: Draw, op: str) -> Call:
    x, dtype = shape(draw, (2, 1, 3)), choose(draw, *DTYPES)
    axis = axis_of(draw, len(x))
    values = []
    for _ in range(choose(draw, 2, 3)):
        x = [*x]
        x[axis] = choose(draw, 2, 1, 0)
        values.append(operand(draw, x, dtype))
    return call(op, values=values, axis=parameter(draw, axis))


@family("Split SplitV")
def _split(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3))
    axis = axis_of(draw, len(x))
    x[axis] = 4
    value = operand(draw, x, choose(draw, *DTYPES))
    if op == "Split":
        return call(op, axis=parameter(draw, axis), value=value, num_split=choose(draw, 2, 1, 4))
    sizes = choose(draw, [1, 3], [4], [2, 0, 2], [1, -1])
    return call(op, value=value, size_splits=parameter(draw, sizes), axis=parameter(draw, axis), num_split=len(sizes))


@family("Tile")
def _tile(draw: Draw, op: str) -> Call:
    x = shape(draw)
    multiples = parameter(draw, [choose(draw, 2, 1, 0) for _ in x], choose(draw, *INTEGERS))
    return call(op, input=operand(draw, x, choose(draw, *DTYPES)), multiples=multiples)


@family("MirrorPad Pad PadV2")
def _pad(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3), (3, 2))
    pads = parameter(
        draw, [[choose(draw, 1, 0, 2)] * 2 for _ in x] if op != "MirrorPad" else [[1, choose(draw, 0, 1)] for _ in x]
    )
    dtype = choose(draw, "float32", "int32", "float64", "complex64")
    extra = {
        "Pad": {},
        "PadV2": {"constant_values": operand(draw, [], dtype, sources=SHARED)},
        "MirrorPad": {"mode": choose(draw, "REFLECT", "SYMMETRIC")},
    }
    return call(op, input=operand(draw, x, dtype), paddings=pads, **extra[op])


@family("ConjugateTranspose Transpose")
def _transpose(draw: Draw, op: str) -> Call:
    x = shape(draw)
    perm = parameter(draw, draw(st.permutations(range(len(x)))))
    dtypes = DTYPES if op == "Transpose" else DTYPES[:-1]  # a string that is conjugated ends the process
    return call(op, x=operand(draw, x, choose(draw, *dtypes)), perm=perm)


@family("BroadcastTo")
def _broadcast_to(draw: Draw, op: str) -> Call:
    target = shape(draw)
    x = broadcast(draw, target)
    return call(op, input=operand(draw, x, choose(draw, "float32", "int32", "bool")), shape=parameter(draw, target))


@family("Fill")
def _fill(draw: Draw, op: str) -> Call:
    return call(op, value=operand(draw, [], choose(draw, *DTYPES)), dims=parameter(draw, shape(draw)))


@family("EnsureShape")
def _ensure_shape(draw: Draw, op: str) -> Call:
    x = shape(draw)
    return call(op, input=operand(draw, x, choose(draw, *DTYPES)), shape=[choose(draw, length, None) for length in x])


# Slicing and gathering


@family("StridedSlice StridedSliceGrad")
def _strided_slice(draw: Draw, op: str) -> Call:
    """One bit of a mask for each entry: ellipsis, new axis, shrink, or a range with or without begin and end."""
    x = shape(draw, (2, 1, 3, 4), (3, 2))
    masks = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0)
    begin, end, strides, axis = [], [], [], 0
    for place in range(choose(draw, *range(1, len(x) + 2))):
        kinds = ["range", "shrink"] * (axis < len(x)) + ["new_axis"] + ["ellipsis"] * (not masks["ellipsis_mask"])
        kind = choose(draw, *kinds) if not masks["ellipsis_mask"] else "new_axis"
        length, first, stride = x[axis] if axis < len(x) else 1, 0, 1
        last = length
        if kind == "range":
            stride = choose(draw, 1, 2, -1)
            first, last = choose(draw, (0, length), (1, length), (0, -1), (-1, length), (0, 9))
            if stride < 0:
                first, last = last, choose(draw, 0, -length - 1)
            masks["begin_mask"] |= choose(draw, 0, 1) << place
            masks["end_mask"] |= choose(draw, 0, 1) << place
        elif kind == "shrink":
            first = choose(draw, 0, -1, length - 1)
            last = first + 1
        if kind != "range":
            masks[{"shrink": "shrink_axis_mask"}.get(kind, f"{kind}_mask")] |= 1 << place
        axis += kind in ("range", "shrink")
        begin, end, strides = [*begin, first], [*end, last], [*strides, stride]
    source = choose(draw, *["constant"] * 12, "variable", "stacked", "captured")
    ends = {"begin": begin, "end": end, "strides": strides}
    ends = {k: parameter(draw, v, source="constant" if k == "strides" else source) for k, v in ends.items()}
    dtype = choose(draw, *DTYPES)
    if op == "StridedSlice":
        return call(op, input=operand(draw, x, dtype), **ends, **masks)
    result = tf.raw_ops.StridedSlice(input=tf.zeros(x), begin=begin, end=end, strides=strides, **masks).shape
    dtype = choose(draw, *FLOATS, *INTEGERS)
    return call(op, dy=operand(draw, [*result], dtype), shape=parameter(draw, x), **ends, **masks)


@family("Slice")
def _slice(draw: Draw, op: str) -> Call:
    x = shape(draw)
    begin = [choose(draw, *range(length + 1)) for length in x]
    size = [choose(draw, -1, *range(length - first + 1)) for first, length in zip(begin, x)]
    ends = {"begin": parameter(draw, begin), "size": parameter(draw, size)}
    return call(op, input=operand(draw, x, choose(draw, *DTYPES)), **ends)


@family("GatherV2")
def _gather(draw: Draw, op: str) -> Call:
    x = shape(draw, (2, 1, 3), (3, 2))
    batch = choose(draw, 0, *range(len(x)))
    axis = choose(draw, *range(batch, len(x)))
    shape_of_indices = [*x[:batch], *shape(draw, (1, 0, 2))]
    indices = operand(draw, shape_of_indices, choose(draw, *INTEGERS), between(0, x[axis] - 1))
    batch_dims = choose(draw, batch, batch - len(shape_of_indices)) if batch else 0
    return call(
        op,
        params=operand(draw, x, choose(draw, *DTYPES)),
        indices=indices,
        axis=parameter(draw, choose(draw, axis, axis - len(x))),
        batch_dims=batch_dims,
    )


@family("GatherNd")
def _gather_nd(draw: Draw, op: str) -> Call:
    x = [3] * choose(draw, 2, 1, 3)
    indices = operand(draw, [*shape(draw, (1, 0, 2)), choose(draw, *range(1, len(x) + 1), 0)], "int32", between(0, 2))
    return call(op, params=operand(draw, x, choose(draw, *DTYPES)), indices=indices)


@family("ScatterNd TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate")
def _scatter(draw: Draw, op: str) -> Call:
    def different(random: Any, shape: Sequence[int], dtype: str) -> Any:
        return np.argsort(random.random((*shape[:-2], 4)))[..., : shape[-2], None].astype(dtype)

    whole = [4, *shape(draw, (1, 0, 2), (3, 2, 1))]
    count, dtype = choose(draw, 2, 1, 0), choose(draw, *FLOATS, *INTEGERS)
    indices = operand(draw, [count, 1], choose(draw, "int32", *[] if op == "ScatterNd" else ["int64"]), different)
    updates = operand(draw, [count, *whole[1:]], dtype)
    if op == "ScatterNd":
        return call(op, indices=indices, updates=updates, shape=parameter(draw, whole))
    return call(op, tensor=operand(draw, whole, dtype), indices=indices, updates=updates)


@family("OneHot")
def _one_hot(draw: Draw, op: str) -> Call:
    indices, dtype = shape(draw, (1, 0, 2)), choose(draw, "float32", "int32", "bool", "complex64")
    axis = choose(draw, -1, *range(len(indices) + 1))
    on, off = (operand(draw, [], dtype, sources=choose(draw, "captured", "constant", "stacked")) for _ in range(2))
    found = operand(draw, indices, choose(draw, *INTEGERS, "uint8"), between(0, 4))
    return call(op, indices=found, depth=parameter(draw, choose(draw, 3, 1, 0)), on_value=on, off_value=off, axis=axis)


@family("UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum")
def _unsorted_segment(draw: Draw, op: str) -> Call:
    ids, rest = shape(draw, (1, 2, 0), (3, 2, 0)), shape(draw, (1, 0, 2))
    segments = operand(draw, ids, choose(draw, *INTEGERS), between(choose(draw, 0, -1), 2))
    data = operand(draw, [*ids, *rest], choose(draw, *FLOATS, *INTEGERS))
    return call(op, data=data, segment_ids=segments, num_segments=parameter(draw, choose(draw, 3, 4)))


@family("SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum")
def _segment(draw: Draw, op: str) -> Call:
    ids = parameter(draw, choose(draw, [0, 0, 1], [0, 2], [1]), choose(draw, *INTEGERS))
    data = operand(draw, [ids.shape[0], *shape(draw, (1, 0, 2))], choose(draw, *FLOATS, "int32"))
    return call(op, data=data, segment_ids=ids)


# Matrices


def _well_conditioned(random: Any, shape: Sequence[int], dtype: str) -> Any:
    return ANY(random, shape, dtype) * 0.1 + np.diag(np.arange(2, shape[-1] + 2)).astype(dtype)


def _positive_definite(random: Any, shape: Sequence[int], dtype: str) -> Any:
    matrix = _well_conditioned(random, shape, dtype)
    return matrix @ np.conj(np.swapaxes(matrix, -1, -2))


MATRIX_TYPES = ("float32", "float64", "complex64")


@family("MatMul")
def _matmul(draw: Draw, op: str) -> Call:
    rows, inner, columns = (choose(draw, 3, 2, 1, 0) for _ in range(3))
    flags = {"transpose_a": choose(draw, False, True), "transpose_b": choose(draw, False, True)}
    a = [inner, rows] if flags["transpose_a"] else [rows, inner]
    b = [columns, inner] if flags["transpose_b"] else [inner, columns]
    dtype = choose(draw, *MATRIX_TYPES, "int32")
    return call(op, a=operand(draw, a, dtype), b=operand(draw, b, dtype), **flags)


@family("BatchMatMul BatchMatMulV2")
def _batch_matmul(draw: Draw, op: str) -> Call:
    rows, inner, columns = (choose(draw, 3, 2, 1, 0) for _ in range(3))
    flags = {"adj_x": choose(draw, False, True), "adj_y": choose(draw, False, True)}
    batch = shape(draw, (1, 0, 2))
    other = batch if op == "BatchMatMul" else broadcast(draw, batch)
    x = [*batch, *([inner, rows] if flags["adj_x"] else [rows, inner])]
    y = [*other, *([columns, inner] if flags["adj_y"] else [inner, columns])]
    dtype = choose(draw, *MATRIX_TYPES, "int32")
    return call(op, x=operand(draw, x, dtype), y=operand(draw, y, dtype), **flags)


@family("Einsum")
def _einsum(draw: Draw, op: str) -> Call:
    equations = (
        "ij,jk->ik|i,j->ij|i,i->|ij->ji|ii->i|ij->|ij,ij->i|abc,cd->abd|...ij,jk->...ik|i...,i->...|,i->i|a,b->ba"
    )
    equation = choose(draw, *equations.split("|"))
    lengths = {axis: choose(draw, 3, 2, 1) for axis in "abcdijk"}
    dots, dtype = shape(draw, (1, 0, 2)), choose(draw, *MATRIX_TYPES)
    inputs = []
    for axes in equation.partition("->")[0].split(","):
        before, more, after = axes.partition("...")
        x = [*(lengths[axis] for axis in before), *(dots if more else []), *(lengths[axis] for axis in after)]
        inputs.append(operand(draw, x, dtype))
    return call(op, inputs=inputs, equation=equation)


@family("BiasAdd BiasAddGrad")
def _bias(draw: Draw, op: str) -> Call:
    layout = choose(draw, "NHWC", "NCHW")
    x, dtype = shape(draw, (4, 3) if layout == "NCHW" else (2, 3, 4), (3, 2, 1)), choose(draw, *FLOATS)
    if op == "BiasAddGrad":
        return call(op, out_backprop=operand(draw, x, dtype), data_format=layout)
    bias = operand(draw, [x[1 if layout == "NCHW" else -1]], dtype)
    return call(op, value=operand(draw, x, dtype), bias=bias, data_format=layout)


@family("Cross")
def _cross(draw: Draw, op: str) -> Call:
    x, dtype = [*shape(draw, (1, 0, 2)), 3], choose(draw, *FLOATS, *INTEGERS)
    return call(op, a=operand(draw, x, dtype), b=operand(draw, x, dtype))


@family(
    "Cholesky Eig LogMatrixDeterminant Lu MatrixDeterminant MatrixInverse MatrixLogarithm MatrixSquareRoot Qr "
    "SelfAdjointEigV2 Svd"
)
def _decomposition(draw: Draw, op: str) -> Call:
    n, batch, dtype = choose(draw, 3, 2, 1), shape(draw, (0, 1, 2), (2, 1, 0)), choose(draw, *FLOATS)
    attributes: dict[str, Any] = {
        "MatrixInverse": {"adjoint": choose(draw, False, True)},
        "Qr": {"full_matrices": choose(draw, False, True)},
        "Eig": {"compute_v": choose(draw, True, False), "Tout": tf.complex128 if dtype == "float64" else tf.complex64},
        "SelfAdjointEigV2": {"compute_v": choose(draw, True, False)},
        "Svd": {"compute_uv": choose(draw, True, False), "full_matrices": choose(draw, False, True)},
        "Lu": {"output_idx_type": choose(draw, tf.int32, tf.int64)},
    }
    dtype = "complex64" if op == "MatrixLogarithm" else dtype
    make = _positive_definite if op in ("Cholesky", "SelfAdjointEigV2") else _well_conditioned
    drawn = attributes.get(op, {})
    values_only = False in (drawn.get("compute_v"), drawn.get("compute_uv"))
    # Kernels leave the vectors uninitialised if they are not computed.
    run = (lambda **arguments: getattr(tf.raw_ops, op)(**arguments)[0]) if values_only else None
    return call(op, run, input=operand(draw, [*batch, n, n], dtype, make), **drawn)


@family("MatrixSolve MatrixTriangularSolve")
def _solve(draw: Draw, op: str) -> Call:
    n, batch, dtype = choose(draw, 3, 2, 1), shape(draw, (0, 1, 2), (2, 1, 0)), choose(draw, *MATRIX_TYPES)
    flags = {"adjoint": choose(draw, False, True)}
    other = batch
    if op == "MatrixTriangularSolve":
        flags["lower"] = choose(draw, True, False)
        other = broadcast(draw, batch)
    matrix = operand(draw, [*batch, n, n], dtype, _well_conditioned)
    return call(op, matrix=matrix, rhs=operand(draw, [*other, n, choose(draw, 2, 1, 0)], dtype), **flags)


@family("CholeskyGrad")
def _cholesky_grad(draw: Draw, op: str) -> Call:
    n, dtype = choose(draw, 3, 2, 1), choose(draw, *FLOATS)
    factor = lambda *likes: np.linalg.cholesky(_positive_definite(*likes))
    x = [*shape(draw, (0, 1, 2), (2, 1)), n, n]
    return call(op, l=operand(draw, x, dtype, factor), grad=operand(draw, x, dtype))


@family("TridiagonalMatMul TridiagonalSolve")
def _tridiagonal(draw: Draw, op: str) -> Call:
    def make(random: Any, shape: Sequence[int], dtype: str) -> Any:
        return ANY(random, shape, dtype) * 0.1 + np.asarray([[0.0], [3.0], [0.0]], dtype)

    n, batch, dtype = choose(draw, 3, 2), shape(draw, (0, 1), (2, 1)), choose(draw, *FLOATS)
    rhs = operand(draw, [*batch, n, 2], dtype)
    if op == "TridiagonalMatMul":
        names = ("superdiag", "maindiag", "subdiag")
        return call(op, **{name: operand(draw, [*batch, 1, n], dtype) for name in names}, rhs=rhs)
    diagonals = operand(draw, [*batch, 3, n], dtype, make)
    return call(op, diagonals=diagonals, rhs=rhs, partial_pivoting=choose(draw, True, False))


@family("Diag DiagPart MatrixDiag MatrixDiagPart MatrixBandPart")
def _diagonal(draw: Draw, op: str) -> Call:
    dtype = choose(draw, "float32", "int32", "complex64")
    if op in ("Diag", "DiagPart"):
        x = shape(draw, (1, 2))
        return call(op, **{inputs_of(op)[0]: operand(draw, x * (2 if op == "DiagPart" else 1), dtype)})
    x = shape(draw, (2, 3, 1) if op == "MatrixDiag" else (2, 3), (3, 2, 1))
    band = {}
    if op == "MatrixBandPart":
        band = {name: parameter(draw, choose(draw, 0, 1, -1), "int64") for name in ("num_lower", "num_upper")}
    return call(op, **{inputs_of(op)[0]: operand(draw, x, dtype)}, **band)


@family("MatrixDiagPartV3 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV3")
def _diagonals(draw: Draw, op: str) -> Call:
    batch, dtype = shape(draw, (0, 1, 2), (2, 1)), choose(draw, "float32", "int32")
    k, count, length = choose(draw, (0, 0, 3), (1, 0, 2), (-1, 0, 2), ([-1, 0], 2, 3), ([0, 0], 1, 3))
    diagonals = operand(draw, [*batch, *[count][: count > 0 and k != [0, 0]], length], dtype)
    align = {"align": choose(draw, "RIGHT_LEFT", "LEFT_LEFT", "LEFT_RIGHT")} if op.endswith("V3") else {}
    matrix = operand(draw, [*batch, 3, 3], dtype)
    if op == "MatrixSetDiag":
        return call(op, input=matrix, diagonal=operand(draw, [*batch, 3], dtype))
    if "Set" in op:
        return call(op, input=matrix, diagonal=diagonals, k=parameter(draw, k), **align)
    padding = operand(draw, [], dtype, sources=choose(draw, "constant", "captured", "stacked"))
    if "Part" in op:
        return call(op, input=matrix, k=parameter(draw, k), padding_value=padding, **align)
    sizes = {name: parameter(draw, choose(draw, -1, 3)) for name in ("num_rows", "num_cols")}
    return call(op, diagonal=diagonals, k=parameter(draw, k), padding_value=padding, **sizes, **align)


@family("FFT FFT2D FFT3D IFFT IFFT2D IFFT3D")
def _fft(draw: Draw, op: str) -> Call:
    least = int(op[-2]) if op.endswith("D") else 1
    return call(op, input=operand(draw, shape(draw, (least, least + 1), (3, 2, 1)), "complex64"))


@family("IRFFT IRFFT2D IRFFT3D RFFT RFFT2D RFFT3D")
def _rfft(draw: Draw, op: str) -> Call:
    least = int(op[-2]) if op.endswith("D") else 1
    x = shape(draw, (least, least + 1), (4, 3))
    lengths = parameter(draw, [choose(draw, 2, 3, length) for length in x[-least:]])
    return call(op, input=operand(draw, x, "float32" if op.startswith("R") else "complex64"), fft_length=lengths)


# Convolutions, pools and images


def _windows(draw: Draw, spatial: int) -> dict[str, Any]:
    """Strides and padding of a window over so many spatial axes, channels last."""
    stride = choose(draw, 1, 2)
    return {"strides": [1, *[stride] * spatial, 1], "padding": choose(draw, "SAME", "VALID")}


def _image(draw: Draw, spatial: int = 2, channels: int = 2) -> list[int]:
    return [choose(draw, 2, 1), *[choose(draw, 5, 4)] * spatial, channels]


@family(
    "Conv2D Conv2DBackpropFilter Conv2DBackpropInput DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter "
    "DepthwiseConv2dNativeBackpropInput Conv3D Conv3DBackpropInputV2"
)
def _convolution(draw: Draw, op: str) -> Call:
    forward = op.partition("Backprop")[0]
    spatial, dtype = 3 if forward == "Conv3D" else 2, choose(draw, *FLOATS)
    dilation = choose(draw, 1, 2) if op == "Conv2D" else 1
    windows = _windows(draw, spatial) | {"dilations": [1, *[dilation] * spatial, 1]}
    image, kernel = _image(draw, spatial), [2] * spatial + [2, choose(draw, 3, 1)]
    if op == forward:
        return call(
            op, input=operand(draw, image, dtype), filter=operand(draw, kernel, dtype, sources=SHARED), **windows
        )
    result = getattr(tf.raw_ops, forward)(input=tf.zeros(image), filter=tf.zeros(kernel), **windows).shape
    backprop = {"out_backprop": operand(draw, result, dtype)}
    if "Input" in op:
        sizes = {"input_sizes": parameter(draw, image), "filter": operand(draw, kernel, dtype, sources=SHARED)}
    else:
        sizes = {"filter_sizes": parameter(draw, kernel), "input": operand(draw, image, dtype)}
    return call(op, **backprop, **sizes, **windows)


@family(
    "AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad MaxPoolGradV2 MaxPoolV2"
)
def _pool(draw: Draw, op: str) -> Call:
    spatial = 3 if "3D" in op else 2
    forward = op.partition("Grad")[0] if "Grad" in op else op.removesuffix("V2")
    windows = _windows(draw, spatial) | {"ksize": [1, *[2] * spatial, 1]}
    random, size = np.random.default_rng(draw(st.integers(0, 999))), _image(draw, spatial)
    name = inputs_of(forward)[0]
    image = operand(draw, size)
    if op in ("MaxPoolV2", forward):
        sizes = {k: parameter(draw, windows.pop(k)) for k in ("ksize", "strides")} if op == "MaxPoolV2" else {}
        return call(op, **{inputs_of(op)[0]: image}, **sizes, **windows)
    pooled = getattr(tf.raw_ops, forward)(**{name: tf.zeros(size)}, **windows).shape
    if forward.startswith("Avg"):
        return call(op, grad=operand(draw, pooled), orig_input_shape=parameter(draw, size), **windows)
    values = ANY(random, (ROWS, *size), "float32")
    pools = np.stack([getattr(tf.raw_ops, forward)(**{name: row}, **windows) for row in values])
    original, result = Operand(values, "stacked", (False,) * len(size)), Operand(pools, "stacked", (False,) * len(size))
    if not draw(st.booleans()):
        original, result = (Operand(each.values[0], "captured", each.unknown) for each in (original, result))
    grad = operand(draw, pooled)
    sizes = {k: parameter(draw, windows.pop(k)) for k in ("ksize", "strides")} if op.endswith("V2") else {}
    return call(op, orig_input=original, orig_output=result, grad=grad, **sizes, **windows)


@family("FusedBatchNormGradV3 FusedBatchNormV3")
def _batch_norm(draw: Draw, op: str) -> Call:
    size, training = _image(draw), choose(draw, False, True)
    x = operand(draw, size)
    scale, offset, mean = (operand(draw, size[-1:], sources=SHARED, known=True) for _ in range(3))
    variance = operand(draw, size[-1:], make=POSITIVE, sources=SHARED, known=True)
    empty = parameter(draw, [], "float32", "constant")
    run = lambda **arguments: getattr(tf.raw_ops, op)(**arguments)[: 3 if training else 1]
    arguments = {"x": x, "scale": scale, "is_training": training}
    if op == "FusedBatchNormGradV3":
        moments = {"reserve_space_1": mean, "reserve_space_2": variance, "reserve_space_3": empty}
        return call(op, run, y_backprop=operand(draw, size), **arguments, **moments)
    moments = {"mean": empty, "variance": empty} if training else {"mean": mean, "variance": variance}
    return call(op, run, offset=offset, **arguments, **moments)


@family("Dilation2D")
def _dilation(draw: Draw, op: str) -> Call:
    windows = _windows(draw, 2) | {"rates": [1, 1, 1, 1]}
    return call(op, input=operand(draw, _image(draw)), filter=operand(draw, [2, 2, 2], sources=SHARED), **windows)


@family("LRN LRNGrad")
def _response_normalization(draw: Draw, op: str) -> Call:
    size, radius = _image(draw, channels=4), choose(draw, 1, 2)
    return call(op, **{name: operand(draw, size, make=POSITIVE) for name in inputs_of(op)}, depth_radius=radius)


@family("DepthToSpace SpaceToDepth")
def _blocks(draw: Draw, op: str) -> Call:
    x = operand(draw, [choose(draw, 2, 1), 4, 2, 4], choose(draw, "float32", "int32"))
    return call(op, input=x, block_size=2)


@family("BatchToSpaceND SpaceToBatchND")
def _batches(draw: Draw, op: str) -> Call:
    batch = 4 if op == "BatchToSpaceND" else choose(draw, 1, 2)
    x = operand(draw, [batch, *(choose(draw, 2, 4) for _ in range(2)), *shape(draw, (1, 0), (2, 1))])
    ends = {"crops" if op == "BatchToSpaceND" else "paddings": parameter(draw, [[0, 0], choose(draw, [0, 0], [1, 1])])}
    return call(op, input=x, block_shape=parameter(draw, [2, 2]), **ends)


@family("ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor")
def _resize(draw: Draw, op: str) -> Call:
    corners, halves = choose(draw, (False, True), (False, False), (True, False))
    flags = {"align_corners": corners} | ({"half_pixel_centers": halves} if op != "ResizeArea" else {})
    images = operand(draw, _image(draw), choose(draw, "float32", "float64", "int32"))
    return call(op, images=images, size=parameter(draw, choose(draw, [3, 6], [2, 2])), **flags)


@family("ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad")
def _resize_grad(draw: Draw, op: str) -> Call:
    corners, halves = choose(draw, (False, True), (False, False), (True, False))
    flags = {"align_corners": corners, "half_pixel_centers": halves}
    size = _image(draw)
    grads = operand(draw, [size[0], 3, 6, size[-1]])
    if op == "ResizeNearestNeighborGrad":
        return call(op, grads=grads, size=parameter(draw, size[1:3]), **flags)
    return call(op, grads=grads, original_image=operand(draw, size), **flags)


@family("ExtractImagePatches")
def _patches(draw: Draw, op: str) -> Call:
    windows = _windows(draw, 2) | {"ksizes": [1, 2, 2, 1], "rates": [1, *[choose(draw, 1, 2)] * 2, 1]}
    return call(op, images=operand(draw, _image(draw), choose(draw, *FLOATS, "int32")), **windows)


@family("AdjustContrastv2 AdjustHue AdjustSaturation HSVToRGB RGBToHSV")
def _colours(draw: Draw, op: str) -> Call:
    images = operand(draw, [*shape(draw, (2, 3), (3, 2)), 3], make=PROBABILITY)
    names = inputs_of(op)
    factor = {name: operand(draw, [], make=PROBABILITY, sources=SHARED) for name in names[1:]}
    return call(op, **{names[0]: images}, **factor)


@family("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(draw: Draw, op: str) -> Call:
    rows, classes, dtype = choose(draw, 2, 1, 0), choose(draw, 3, 1), choose(draw, *FLOATS)
    features = operand(draw, [rows, classes], dtype)
    if op.startswith("Sparse"):
        labels = operand(draw, [rows], choose(draw, *INTEGERS), between(0, classes - 1))
    else:
        labels = operand(draw, choose(draw, [rows, classes], [1, classes], [rows, 1]), dtype, PROBABILITY)
    return call(op, features=features, labels=labels)


# Strings, tables and variables

STRINGS: dict[str, tuple[str, dict[str, Sequence[Any]]]] = {
    "DecodeBase64": ("input", {}),
    "EncodeBase64": ("input", {"pad": (False, True)}),
    "StaticRegexFullMatch": ("input", {"pattern": ("a.*", "[A-Z].*")}),
    "StaticRegexReplace": ("input", {"pattern": ("e",), "rewrite": ("ee",), "replace_global": (True, False)}),
    "StringLength": ("input", {"unit": ("BYTE", "UTF8_CHAR")}),
    "StringLower": ("input", {"encoding": ("", "utf-8")}),
    "StringStrip": ("input", {}),
    "StringToHashBucket": ("string_tensor", {"num_buckets": (7, 99)}),
    "StringToHashBucketFast": ("input", {"num_buckets": (7, 99)}),
    "StringToHashBucketStrong": ("input", {"num_buckets": (7, 99), "key": ([1, 2],)}),
    "StringToNumber": ("string_tensor", {"out_type": (tf.float32, tf.int64)}),
    "StringUpper": ("input", {"encoding": ("", "utf-8")}),
}
"""The name of the input, and the values of the attributes."""


@family(" ".join(STRINGS))
def _string(draw: Draw, op: str) -> Call:
    def numbers(random: Any, shape: Sequence[int], dtype: str) -> Any:
        return random.integers(1000, 9999, shape).astype(str).astype(object)

    name, attributes = STRINGS[op]
    make = numbers if op in ("StringToNumber", "DecodeBase64") else ANY
    drawn = {attribute: choose(draw, *values) for attribute, values in attributes.items()}
    return call(op, **{name: operand(draw, shape(draw), "string", make)}, **drawn)


@family("AsString")
def _as_string(draw: Draw, op: str) -> Call:
    return call(op, input=operand(draw, shape(draw), choose(draw, "float32", "int32", "bool")))


@functools.cache
def _table() -> Any:
    known = tf.lookup.KeyValueTensorInitializer(["a", "Some Text"], tf.constant([1, 2], tf.int64))
    return tf.lookup.StaticHashTable(known, -1)


@family("LookupTableFindV2")
def _lookup(draw: Draw, op: str) -> Call:
    return call(op, lambda keys: _table().lookup(keys), keys=operand(draw, shape(draw, (1, 0, 2)), "string"))


@family("ResourceGather")
def _resource_gather(draw: Draw, op: str) -> Call:
    variable = tf.Variable(ANY(np.random.default_rng(0), [4, 3], "float32"))
    indices = operand(draw, shape(draw, (1, 0, 2), (2, 1, 0)), choose(draw, *INTEGERS), between(0, 3))
    return call(op, lambda indices: variable.sparse_read(indices), indices=indices)


@family("Assert")
def _assert(draw: Draw, op: str) -> Call:
    def run(x: Any) -> Any:
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.reduce_all(x < 9), data=[x])]):
            return tf.identity(x)

    return call(op, run, x=operand(draw, shape(draw)))


# Lists of tensors


def _list(
    draw: Draw, op: str, read: Callable[[Any, int, Any], Any], more: Callable[[Any, Any], Any] | None = None
) -> Call:
    """A list made of a tensor's elements, changed by `more`, and then read."""
    whole, dtype = [3, *shape(draw, (1, 0, 2))], choose(draw, "float32", "int32", "bool", "string")
    at = choose(draw, *range(3))

    def run(x: Any, element: Any) -> Any:
        handle = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=tf.constant(x.shape[1:].as_list(), tf.int32))
        return read(more(handle, element) if more else handle, at, x)

    return call(op, run, x=operand(draw, whole, dtype, known=True), element=operand(draw, whole[1:], dtype, known=True))


def _stack(handle: Any, at: int, x: Any) -> Any:
    shape = tf.constant(x.shape[1:].as_list(), tf.int32)
    return tf.raw_ops.TensorListStack(input_handle=handle, element_shape=shape, element_dtype=x.dtype)


def _get(handle: Any, at: int, x: Any) -> Any:
    return tf.raw_ops.TensorListGetItem(
        input_handle=handle, index=at, element_shape=tf.constant(x.shape[1:].as_list(), tf.int32), element_dtype=x.dtype
    )


def _gathered(handle: Any, at: int, x: Any) -> Any:
    return tf.raw_ops.TensorListGather(
        input_handle=handle,
        indices=tf.constant([at, 0]),
        element_shape=tf.constant(x.shape[1:].as_list(), tf.int32),
        element_dtype=x.dtype,
    )


def _popped(handle: Any, at: int, x: Any) -> Any:
    shape = tf.constant(x.shape[1:].as_list(), tf.int32)
    rest, last = tf.raw_ops.TensorListPopBack(input_handle=handle, element_shape=shape, element_dtype=x.dtype)
    return [last, _stack(rest, at, x)]


LISTS: dict[str, Callable[..., Call]] = {
    "TensorListFromTensor": partial(_list, read=_stack),
    "TensorListStack": partial(_list, read=_stack),
    "TensorListGetItem": partial(_list, read=_get),
    "TensorListGather": partial(_list, read=_gathered),
    "TensorListPopBack": partial(_list, read=_popped),
    "TensorListLength": partial(_list, read=lambda h, at, x: tf.raw_ops.TensorListLength(input_handle=h)),
    "TensorListElementShape": partial(
        _list, read=lambda h, at, x: tf.raw_ops.TensorListElementShape(input_handle=h, shape_type=tf.int32)
    ),
    "TensorListPushBack": partial(
        _list, read=_stack, more=lambda h, e: tf.raw_ops.TensorListPushBack(input_handle=h, tensor=e)
    ),
    "TensorListSetItem": partial(
        _list, read=_stack, more=lambda h, e: tf.raw_ops.TensorListSetItem(input_handle=h, index=1, item=e)
    ),
    "TensorListScatterIntoExistingList": partial(
        _list,
        read=_stack,
        more=lambda h, e: tf.raw_ops.TensorListScatterIntoExistingList(
            input_handle=h, tensor=tf.stack([e, e]), indices=[2, 0]
        ),
    ),
}


@family(" ".join(LISTS))
def _list_op(draw: Draw, op: str) -> Call:
    return LISTS[op](draw, op)


@family("TensorListReserve")
def _reserved(draw: Draw, op: str) -> Call:
    x, dtype, places = shape(draw, (1, 0, 2)), choose(draw, "float32", "int32"), choose(draw, [0, 1, 2], [2, 0], [1])
    grows = choose(draw, False, True)

    def run(element: Any) -> Any:
        array = tf.TensorArray(element.dtype, 0 if grows else 3, grows, element_shape=element.shape)
        for place in places:
            array = array.write(place, element)
        return array.stack()

    return call(op, run, element=operand(draw, x, dtype, known=True))


# Random numbers

SEEDED: dict[str, Callable[..., Any]] = {
    "StatelessRandomNormalV2": tf.random.stateless_normal,
    "StatelessRandomUniformFullIntV2": partial(tf.random.stateless_uniform, minval=None, maxval=None),
    "StatelessRandomUniformIntV2": partial(tf.random.stateless_uniform, minval=-3, maxval=9),
    "StatelessRandomUniformV2": tf.random.stateless_uniform,
    "StatelessTruncatedNormalV2": tf.random.stateless_truncated_normal,
}


@family(" ".join(SEEDED))
def _seeded(draw: Draw, op: str) -> Call:
    dtype = tf.as_dtype(choose(draw, *(INTEGERS if "Int" in op else FLOATS)))
    seed = operand(draw, [2], "int32", between(0, 999), known=True)
    return call(op, partial(SEEDED[op], dtype=dtype), seed=seed, shape=parameter(draw, shape(draw)))


@family("RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal")
def _random(draw: Draw, op: str) -> Call:
    """The numbers of two calls differ: only their shape and dtype can be compared."""
    ends = {"minval": 0, "maxval": 9} if op.endswith("Int") else {"dtype": tf.float32}
    run = lambda shape, x: tf.zeros_like(getattr(tf.raw_ops, op)(shape=shape, **ends)) + tf.zeros_like(x)
    dtype = "int32" if op.endswith("Int") else "float32"
    return call(op, run, shape=parameter(draw, shape(draw), source="constant"), x=operand(draw, [], dtype))


@family("Multinomial RandomGamma RandomPoissonV2")
def _random_of(draw: Draw, op: str) -> Call:
    """Like `_random`, with parameters of the distribution."""
    given = operand(draw, [2, 3] if op == "Multinomial" else [2], make=POSITIVE)
    names = {
        "Multinomial": ("logits", "num_samples"),
        "RandomGamma": ("alpha", "shape"),
        "RandomPoissonV2": ("rate", "shape"),
    }
    name, count = names[op]
    size = parameter(draw, 2 if op == "Multinomial" else shape(draw), source="constant")
    return call(
        op, lambda **arguments: tf.zeros_like(getattr(tf.raw_ops, op)(**arguments)), **{name: given, count: size}
    )


RUNS_ROW_BY_ROW = frozenset(
    {
        *SEEDED,
        *("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "FusedBatchNormGradV3"),
    }
)
"""Ops that are not in the table: each runs row by row alone."""
