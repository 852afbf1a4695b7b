"""Families of ops, each with the forms that it is tried in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from proving.trials import Input, Trial, product

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int32", "int64", "uint8", "int8", "int16", "uint16")
COMPLEX = ("complex64", "complex128")
NUMBERS = (*FLOATS, *INTEGERS, *COMPLEX)
COMMON = ("float32", "float64", "int32", "int64")
SIZES = (2, 3, 4, 5)
KINDS = ("", "1", "z", "?")

_raw: Any = tf.raw_ops


def shape_of(rank: int, kind: str = "", turn: int = 0) -> tuple[int, ...]:
    """A shape whose axes fit those of others from the end; with an axis of length 1 or 0, in turn another one."""
    lengths = list(SIZES[len(SIZES) - rank :])
    if rank and kind in ("1", "z"):
        lengths[turn % rank] = 1 if kind == "1" else 0
    return tuple(lengths)


def given(rank: int, dtype: str, kind: str = "", stacked: bool = True, turn: int = -1, **more: Any) -> Iterator[Input]:
    """An input of that rank and kind: where its lengths are not known before it runs, of several lengths."""
    if kind == "?" and stacked:
        for each in ("", "1", "z"):
            yield Input(shape_of(rank, each, turn), dtype, stacked, True, **more)
    elif kind != "?":
        yield Input(shape_of(rank, kind, turn), dtype, stacked, **more)


def kinds_of(rank: int) -> Sequence[str]:
    return KINDS if rank else ("",)


def types_of(op: str, attribute: str = "T") -> tuple[str, ...]:
    """The dtypes that an op takes, of those that people use."""
    definition = tf.raw_ops.__dict__[op]
    del definition
    allowed = next(a for a in _definition(op).attr if a.name == attribute).allowed_values.list.type
    names = {tf.as_dtype(each).name for each in allowed}
    every = (*NUMBERS, "bool", "string")
    return tuple(name for name in every if name in names or not names)


def _definition(op: str) -> Any:
    from tensorflow.python.framework import op_def_registry  # which dtypes an op takes; for this program alone

    return op_def_registry.get(op)


UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Conj Cos Cosh Digamma Elu Erf Erfc Exp Expm1 Floor Invert IsFinite IsInf IsNan "
    "Lgamma Log Log1p LogicalNot Neg Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign "
    "Sqrt Square Tan Tanh Identity StopGradient ZerosLike OnesLike Real Imag Angle ComplexAbs Erfinv Ndtri BesselI0e BesselI1e"
).split()
BINARY = (
    "Add AddV2 Sub Mul Div RealDiv FloorDiv FloorMod DivNoNan MulNoNan Maximum Minimum Pow SquaredDifference Atan2 Greater "
    "GreaterEqual Less LessEqual LogicalAnd LogicalOr BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift Xdivy Xlogy Xlog1py "
    "TruncateDiv TruncateMod Mod Igamma Igammac"
).split()
COMPARING = ("Equal", "NotEqual")


def many(dtype: str) -> bool:
    """Whether ops are tried in every form with a dtype; others are tried in some, as rules do not ask for dtypes."""
    return dtype == "float32"


def unary(op: str, full: bool = False) -> Iterator[Trial]:
    attribute = next((a.name for a in _definition(op).attr if a.type == "type"), None)
    name = _definition(op).input_arg[0].name
    call = lambda x: getattr(_raw, op)(**{name: x})
    for dtype in ("float32",) if full else types_of(op, attribute) if attribute else ("bool",):
        for rank, kind in itertools.product(range(5), KINDS) if full else ((0, ""), (1, ""), (2, "?"), (3, "")):
            if rank or not kind:
                for each in given(rank, dtype, kind):
                    yield Trial(op, call, (each,))


def binary(op: str, full: bool = False) -> Iterator[Trial]:
    call = (lambda x, y: getattr(_raw, op)(x=x, y=y)) if op not in ("Igamma", "Igammac") else (
        lambda x, y: getattr(_raw, op)(a=x, x=y))  # fmt: skip
    types = types_of(op) if any(a.name == "T" for a in _definition(op).attr) else ("bool",)
    for dtype in ("float32",) if full else types:
        for x, y in pairs(dtype, full):
            yield Trial(op, call, (x, y))


STACKINGS = ((True, True), (True, False), (False, True))


def pairs(dtype: str, full: bool) -> Iterator[tuple[Input, Input]]:
    """What ops that broadcast are given: in every way, or in those that differ most."""
    if not full:
        for a, b in ((0, 0), (1, 1), (2, 0), (0, 1), (2, 1), (1, 3), (3, 3)):
            for s, t in STACKINGS:
                yield next(given(a, dtype, "", s)), next(given(b, dtype, "", t))
        yield next(given(2, dtype, "?")), next(given(1, dtype, "?"))
        return
    for a, b in itertools.product(range(5), repeat=2):
        for one, other in itertools.product(kinds_of(a), kinds_of(b)):
            for s, t in STACKINGS:
                if (s or one != "?") and (t or other != "?"):
                    for turn in (-1, 0)[: 1 + (one == "1" and a > 1)]:
                        for x, y in itertools.product(given(a, dtype, one, s, turn), given(b, dtype, other, t)):
                            if _fit(x.shape, y.shape):
                                yield x, y


def _fit(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(n == m or 1 in (n, m) for n, m in zip(reversed(one), reversed(other)))


def comparing(op: str, full: bool = False) -> Iterator[Trial]:
    for dtype in (*NUMBERS, "bool", "string"):
        for x, y in pairs(dtype, full and dtype == "float32"):
            yield Trial(op, lambda x, y: getattr(_raw, op)(x=x, y=y), (x, y))


def casts() -> Iterator[Trial]:
    every = (*NUMBERS, "bool")
    for source, target in itertools.product(every, repeat=2):
        full = source == "int32" and target == "float32"
        for rank in range(5) if full else (0, 2):
            for kind in kinds_of(rank) if full else ("",):
                for each in given(rank, source, kind):
                    yield Trial("Cast", lambda x, target=target: _raw.Cast(x=x, DstT=tf.as_dtype(target)), (each,))


def selects() -> Iterator[Trial]:
    triples = [(n, n, n) for n in range(5)] + [(0, n, n) for n in range(1, 4)] + [(n, n, 0) for n in range(1, 4)]
    triples += [(n, 0, n) for n in range(1, 4)] + [(n, 0, 0) for n in range(1, 4)] + [(1, 2, 2), (2, 2, 1), (2, 1, 2)]
    for dtype in (*COMMON, "bool", "float16", "complex64"):
        for ranks in triples if many(dtype) else triples[:5]:
            for stacked in itertools.product((True, False), repeat=3):
                for kind in ("", "1", "z", "?") if many(dtype) else ("",):
                    if any(stacked):
                        dtypes = ("bool", dtype, dtype)
                        choices = [list(given(r, d, kind if r else "", s)) for r, d, s in zip(ranks, dtypes, stacked)]
                        for inputs in zip(*choices) if all(len(c) == len(choices[0]) for c in choices) else ():
                            call = lambda c, t, e: _raw.SelectV2(condition=c, t=t, e=e)
                            yield Trial("SelectV2", call, tuple(inputs))


def _axes(rank: int) -> list[list[int]]:
    single = [[a] for a in range(-rank, rank)]
    return [
        [],
        *single,
        *([a, b] for a in range(rank) for b in range(a + 1, rank)),
        list(range(rank)),
        [-1, 0][: max(rank, 0)],
    ]


REDUCTIONS = "Sum Mean Prod Max Min All Any".split()


def reductions(op: str) -> Iterator[Trial]:
    types = ("bool",) if op in ("All", "Any") else types_of(op)
    for dtype in types:
        full = many(dtype) or types == ("bool",)
        for rank in range(5) if full else (1, 3):
            for kind in kinds_of(rank) if full else ("",):
                few = _axes(rank)[:: 1 if rank < 3 and op == "Sum" else 3] if full else ([0], [-1])
                for axes, keep in itertools.product(few, (False, True)):
                    for axis in (axes, *axes[:1]) if len(axes) == 1 else (axes,):
                        if len({a % max(rank, 1) for a in axes}) == len(axes):
                            call = partial(_reduce, op, axis, keep)
                            for each in given(rank, dtype, kind):
                                yield Trial(op, call, (each,))


def _reduce(op: str, axis: Any, keep: bool, x: Any) -> Any:
    return getattr(_raw, op)(input=x, axis=tf.constant(axis, tf.int32), keep_dims=keep)


def along_an_axis() -> Iterator[Trial]:
    for dtype in COMMON:
        for rank in range(1, 5) if many(dtype) else (2,):
            for axis in range(-rank, rank):
                for kind in kinds_of(rank) if many(dtype) else ("",):
                    for each in given(rank, dtype, kind):
                        for op in ("ArgMax", "ArgMin"):
                            for out in (tf.int32, tf.int64):
                                call = partial(_arg, op, axis, out)
                                yield Trial(op, call, (each,))
                        for op, flags in itertools.product(
                            ("Cumsum", "Cumprod"), product(exclusive=(0, 1), reverse=(0, 1))
                        ):
                            yield Trial(op, partial(_scan, op, axis, flags), (each,))
                        yield Trial("ReverseV2", lambda x, axis=axis: _raw.ReverseV2(tensor=x, axis=[axis]), (each,))
                        yield Trial(
                            "Roll",
                            lambda x, axis=axis: _raw.Roll(input=x, shift=tf.constant(1), axis=tf.constant(axis)),
                            (each,),
                        )


def _arg(op: str, axis: int, out: Any, x: Any) -> Any:
    return getattr(_raw, op)(input=x, dimension=tf.constant(axis), output_type=out)


def _scan(op: str, axis: int, flags: dict[str, int], x: Any) -> Any:
    return getattr(_raw, op)(x=x, axis=tf.constant(axis), **{name: bool(flag) for name, flag in flags.items()})


def shaping() -> Iterator[Trial]:
    for dtype in (*COMMON, "bool", "float16", "bfloat16", "uint8", "complex64", "string"):
        for rank in range(5) if many(dtype) else (0, 1, 2, 3):
            for kind in kinds_of(rank) if many(dtype) else ("", "1") if rank == 2 else ("",):
                for x in itertools.islice(given(rank, dtype, kind), None if many(dtype) else 1):
                    yield from _shaped(x, rank)


def _shaped(x: Input, rank: int) -> Iterator[Trial]:
    size = int(np.prod(x.shape))
    shapes: list[list[int]] = [[-1], [1, -1], [-1, 1], list(x.shape), [size]]
    shapes += [[*x.shape[:1], -1]] if rank > 1 else []
    for shape in shapes:
        if not (size == 0 and -1 in shape):
            yield Trial("Reshape", lambda t, s=shape: _raw.Reshape(tensor=t, shape=tf.constant(s, tf.int32)), (x,))
    for axis in range(-rank - 1, rank + 1):
        yield Trial("ExpandDims", lambda t, a=axis: _raw.ExpandDims(input=t, axis=tf.constant(a)), (x,))
        yield Trial("Pack", lambda t, a=axis: _raw.Pack(values=[t, t], axis=a), (x,))
        yield Trial("Pack", lambda t, a=axis: _raw.Pack(values=[t], axis=a), (x,))
        shared = Input(x.shape, x.dtype, False)
        if not x.unknown:
            yield Trial("Pack", lambda t, u, a=axis: _raw.Pack(values=[t, u], axis=a), (x, shared))
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    for axes in ([], *([a] for a in ones), *([a - rank] for a in ones)):
        yield Trial("Squeeze", lambda t, a=axes: _raw.Squeeze(input=t, axis=list(a)), (x,))
    for op in ("Shape", "Size"):
        yield Trial(op, lambda t, op=op: getattr(_raw, op)(input=t), (x,))
    yield Trial("Rank", lambda t: _raw.Rank(input=t), (x,))
    yield Trial("ShapeN", lambda t: _raw.ShapeN(input=[t, t]), (x,))
    yield Trial("IdentityN", lambda t: _raw.IdentityN(input=[t, t]), (x,))
    yield Trial("EnsureShape", lambda t: _raw.EnsureShape(input=t, shape=[None] * rank), (x,))
    yield Trial("Tile", lambda t: _raw.Tile(input=t, multiples=tf.constant([2] * rank, tf.int32)), (x,))
    yield Trial("Tile", lambda t: _raw.Tile(input=t, multiples=tf.constant([1] * rank, tf.int32)), (x,))
    for before in ((2,), (2, 3), ()):
        yield Trial(
            "BroadcastTo",
            lambda t, s=(*before, *x.shape): _raw.BroadcastTo(input=t, shape=tf.constant(s, tf.int32)),
            (x,),
        )
    if rank == 0:
        for dims in ([], [2], [2, 3], [0]):
            yield Trial("Fill", lambda t, d=dims: _raw.Fill(dims=tf.constant(d, tf.int32), value=t), (x,))
    if rank:
        pads = [[1, 2]] * rank
        yield Trial("Pad", lambda t: _raw.Pad(input=t, paddings=tf.constant(pads)), (x,))
        yield Trial("Pad", lambda t: _raw.Pad(input=t, paddings=tf.constant([[0, 0]] * rank)), (x,))
        for value in (0, 3) if x.dtype not in ("bool", "string") else ():
            fill = lambda t, v=value: _raw.PadV2(
                input=t, paddings=tf.constant(pads), constant_values=tf.cast(v, t.dtype)
            )
            yield Trial("PadV2", fill, (x,))
        for axis in range(-rank, rank):
            length = x.shape[axis]
            yield Trial("Unpack", lambda t, a=axis, n=length: _raw.Unpack(value=t, num=n, axis=a), (x,))
            concat = lambda *t, a=axis: _raw.ConcatV2(values=list(t), axis=tf.constant(a))
            yield Trial("ConcatV2", concat, (x, x))
            if not x.unknown:
                yield Trial("ConcatV2", concat, (x, Input(x.shape, x.dtype, False)))
                yield Trial("ConcatV2", concat, (Input(x.shape, x.dtype, False), x))
            if length and not x.unknown:
                yield Trial(
                    "Split", lambda t, a=axis, n=length: _raw.Split(axis=tf.constant(a), value=t, num_split=n), (x,)
                )
                cut = [1, length - 1]
                yield Trial(
                    "SplitV",
                    lambda t, a=axis, c=cut: _raw.SplitV(
                        value=t, size_splits=tf.constant(c), axis=tf.constant(a), num_split=2
                    ),
                    (x,),
                )
        yield from _sliced(x, rank)


def transposing() -> Iterator[Trial]:
    """Not a number, and not by axes from the end: these end the process, vectorised and not."""
    for dtype in (*COMMON, "bool", "float16", "bfloat16", "uint8", "complex64", "string"):
        for rank in range(1, 5) if many(dtype) else (2,):
            for kind in kinds_of(rank) if many(dtype) else ("",):
                for x in given(rank, dtype, kind):
                    for perm in itertools.islice(itertools.permutations(range(rank)), 0, 24, 1 if rank < 4 else 5):
                        for op in ("Transpose", "ConjugateTranspose"):
                            yield Trial(op, partial(_transposed, op, perm), (x,))


def _transposed(op: str, perm: Sequence[int], x: Any) -> Any:
    return getattr(_raw, op)(x=x, perm=tf.constant(perm, tf.int32))


def _sliced(x: Input, rank: int) -> Iterator[Trial]:
    picks: list[Any] = [
        0,
        -1,
        slice(1, None),
        slice(None, -1),
        slice(None),
        slice(None, None, 2),
        slice(None, None, -1),
    ]
    picks += [None, slice(1, 3), slice(0, 2), slice(0, 3, 2), (None, slice(0, 2)), (None, 0), (0, Ellipsis)]
    picks += [
        (None, slice(None)),
        (slice(None), None),
        (None, slice(None), None),
        (Ellipsis, None, None),
        (None, Ellipsis, None),
    ]
    picks += [Ellipsis, (Ellipsis, 0), (Ellipsis, slice(0, 1)), (None, Ellipsis), (Ellipsis, None), slice(-2, None)]
    if rank > 1:
        picks += [
            (0, 0),
            (slice(None), 0),
            (slice(None), slice(1, 2)),
            (slice(None), None),
            (0, slice(1, None)),
            (-1, -1),
        ]
        picks += [(slice(None), -1), (slice(None), slice(None, None, -1)), (slice(None), slice(-2, -1))]
    if rank > 1:
        picks += [(slice(0, 2), slice(0, 2)), (slice(1, None), slice(1, None)), (slice(None), slice(None), None)]
        picks += [(slice(None, -1), slice(1, None)), (0, slice(0, 2)), (slice(0, 2), 0), (None, 0, slice(None))]
    if rank > 2:
        picks += [(0, slice(None), 0), (slice(None), slice(None), 1), (0, 0, 0)]
    for pick in picks:
        yield Trial("StridedSlice", lambda t, p=pick: t[p], (x,))
    index = Input((), "int32", values=lambda random, shape, dtype: random.integers(0, 1, shape).astype(dtype))
    yield Trial("StridedSlice", lambda t, i: t[i], (x, index))
    yield Trial("StridedSlice", lambda t, i: t[i], (Input(x.shape, x.dtype, False), index))
    shared = Input((), "int32", False, values=lambda random, shape, dtype: np.zeros(shape, dtype))
    yield Trial("StridedSlice", lambda t, i: t[i], (x, shared))
    for begin, length in (([0] * rank, [-1] * rank), ([0] * rank, [1] * rank), ([1] * rank, [-1] * rank)):
        yield Trial(
            "Slice", lambda t, b=begin, s=length: _raw.Slice(input=t, begin=tf.constant(b), size=tf.constant(s)), (x,)
        )


def _indices(below: int) -> Callable[..., Any]:
    return lambda random, shape, dtype: random.integers(0, below, shape).astype(dtype)


def gathering() -> Iterator[Trial]:
    for dtype in (*COMMON, "bool", "float16", "uint8", "complex64", "string"):
        for rank, of_index in itertools.product(
            range(1, 4) if many(dtype) else (2,), range(3) if many(dtype) else (0, 1)
        ):
            for index, (s, t) in itertools.product(("int32", "int64") if many(dtype) else ("int32",), STACKINGS):
                kinds = [("", ""), ("?" * s, "?" * (t and of_index > 0))] if many(dtype) else [("", "")]
                for (kind, other), axis in itertools.product(kinds, range(-rank, rank)):
                    x = next(given(rank, dtype, kind, s))
                    for i in given(of_index, index, other, t, values=_indices(2)):
                        yield Trial("GatherV2", partial(_take, axis, 0), (x, i))
                        if rank > 1 and of_index and not kind:
                            rows = (
                                Input((2, *x.shape[1:]), dtype, s),
                                Input((2, *i.shape[1:]), index, t, values=_indices(2)),
                            )
                            yield Trial("GatherV2", partial(_take, axis, 1), rows)
                for last in range(1, rank + 1):
                    place = Input((3, last)[2 - max(1, of_index) :], index, t, values=_indices(2))
                    yield Trial(
                        "GatherNd",
                        lambda p, i: _raw.GatherNd(params=p, indices=i),
                        (Input(shape_of(rank), dtype, s), place),
                    )
    for index in ("int32", "int64", "uint8"):
        for rank in range(4):
            for kind in kinds_of(rank)[:1]:
                for x in given(rank, index, kind):
                    for axis, dtype in itertools.product((-1, 0), ("float32", "int32", "bool", "float64", "int64")):
                        yield Trial("OneHot", partial(_one_hot, axis, dtype), (x,))
    variables = {dtype: tf.Variable(tf.cast(tf.reshape(tf.range(12), [4, 3]), dtype)) for dtype in COMMON}
    for dtype, variable in variables.items():
        for rank, index in itertools.product(range(3), ("int32", "int64")):
            for kind in kinds_of(rank):
                for i in given(rank, index, kind, values=_indices(4)):
                    yield Trial("ResourceGather", lambda i, v=variable: v.sparse_read(i), (i,))
        for rank in range(3):
            for x in given(rank, dtype):
                yield Trial("ReadVariableOp", lambda x, v=variable: v.read_value(), (x,))


def _take(axis: int, batch: int, params: Any, indices: Any) -> Any:
    return _raw.GatherV2(params=params, indices=indices, axis=tf.constant(axis), batch_dims=batch)


def _one_hot(axis: int, dtype: str, indices: Any) -> Any:
    on, off = (tf.constant(bool(n)) if dtype == "bool" else tf.constant(n, dtype) for n in (1, 0))
    return _raw.OneHot(indices=indices, depth=tf.constant(6), on_value=on, off_value=off, axis=axis)


def matrix_products() -> Iterator[Trial]:
    stackings = ((True, True), (True, False), (False, True))
    for dtype in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "complex64", "complex128"):
        sizes = [(3, 4, 2), (1, 4, 2), (3, 1, 2), (3, 4, 1), (0, 4, 2), (3, 0, 2), (3, 4, 0), (1, 4, 1)]
        for (m, k, n), (s, t), flags in itertools.product(
            sizes if many(dtype) else sizes[:4], stackings, product(a=(False, True), b=(False, True))
        ):
            for unknown in (False, True):
                x = Input((k, m) if flags["a"] else (m, k), dtype, s, unknown and s)
                y = Input((n, k) if flags["b"] else (k, n), dtype, t, unknown and t)
                yield Trial("MatMul", partial(_multiply, "MatMul", flags, ("transpose_a", "transpose_b")), (x, y))


def batch_matrix_products() -> Iterator[Trial]:
    """No axes of length 1, or that are not known: oneDNN corrupts memory for a batch of batches of one matrix times one that
    they share (tensorflow/tensorflow#117700)."""
    for dtype in ("float32", "float64", "complex64"):
        for (s, t), flags in itertools.product(
            ((True, True), (True, False), (False, True)), product(a=(False, True), b=(False, True))
        ):
            x = (4, 3) if flags["a"] else (3, 4)
            y = (2, 4) if flags["b"] else (4, 2)
            for before, also in (((2,), (2,)), ((2, 3), (2, 3)), ((3,), (2, 3)), ((2, 3), (3,))):
                inputs = Input((*before, *x), dtype, s), Input((*also, *y), dtype, t)
                call = partial(_multiply, "BatchMatMulV2", flags, ("adj_x", "adj_y"))
                yield Trial("BatchMatMulV2", call, inputs)


def contractions() -> Iterator[Trial]:
    """Likewise."""
    equations = ["ij,jk->ik", "i,i->", "i,j->ij", "bij,bjk->bik", "ij,kj->ik", "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "ij,j->i",
                 "abc,cde->abde", "ij->ji", "ij->i", "ij->", "...ij,...jk->...ik", "...i,ij->...j", "...d,...d->...", "ii->i",
                 "abc,cd->abd", "i,ij->j"]  # fmt: skip
    for equation, dtype in itertools.product(equations, ("float32", "float64", "complex64")):
        sizes = dict(zip("abcdehijkq", (2, 3, 4, 2, 3, 2, 3, 4, 2, 3)))
        left = equation.split("->")[0].split(",")
        for lengths in (sizes, sizes | {"i": 3, "a": 3}):
            shapes = [tuple(lengths[c] for c in part.replace(".", "")) for part in left]
            shapes = [((2, *shape) if "..." in part else shape) for part, shape in zip(left, shapes)]
            for stacked in itertools.product((True, False), repeat=len(left)):
                if any(stacked):
                    inputs = tuple(Input(shape, dtype, s) for shape, s in zip(shapes, stacked))
                    yield Trial("Einsum", lambda *t, e=equation: _raw.Einsum(inputs=list(t), equation=e), inputs)


def _multiply(op: str, flags: dict[str, bool], names: tuple[str, str], x: Any, y: Any) -> Any:
    first, second = ("a", "b") if op == "MatMul" else ("x", "y")
    return getattr(_raw, op)(**{first: x, second: y}, **dict(zip(names, flags.values())))


def _definite(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Matrices that can be inverted, and have a root."""
    x = random.normal(size=shape)
    return (x @ np.swapaxes(x, -1, -2) + 3 * np.eye(shape[-1])).astype(tf.as_dtype(dtype).as_numpy_dtype)


def linear_algebra() -> Iterator[Trial]:
    for dtype in ("float32", "float64"):
        for before, n in itertools.product(((), (2,), (1,), (2, 3)), (1, 3)):
            square = Input((*before, n, n), dtype, values=_definite)
            shared = Input((*before, n, n), dtype, False, values=_definite)
            for op in ("Cholesky", "MatrixInverse", "LogMatrixDeterminant"):
                yield Trial(op, lambda x, op=op: getattr(_raw, op)(input=x), (square,))
            yield Trial("SelfAdjointEigV2", lambda x: _raw.SelfAdjointEigV2(input=x, compute_v=False), (square,))
            for columns in (1, 2):
                for a, s in ((square, True), (square, False), (shared, True)):
                    b = Input((*before, n, columns), dtype, s)
                    for adjoint in (False, True):
                        call = lambda m, r, j=adjoint: _raw.MatrixSolve(matrix=m, rhs=r, adjoint=j)
                        yield Trial("MatrixSolve", call, (a, b))
                        for lower in (False, True):
                            solve = partial(_raw_triangular, lower, adjoint)
                            yield Trial("MatrixTriangularSolve", solve, (a, b))
        for rank, kind in itertools.product((1, 2, 3), ("", "1")):
            for x in given(rank, dtype, kind):
                yield Trial("MatrixDiag", lambda t: _raw.MatrixDiag(diagonal=t), (x,))
                v3 = lambda t: _raw.MatrixDiagV3(
                    diagonal=t, k=0, num_rows=-1, num_cols=-1, padding_value=tf.zeros([], t.dtype)
                )
                yield Trial("MatrixDiagV3", v3, (x,))
                if rank > 1:
                    yield Trial("MatrixDiagPart", lambda t: _raw.MatrixDiagPart(input=t), (x,))
                    part = lambda t: _raw.MatrixDiagPartV3(input=t, k=0, padding_value=tf.zeros([], t.dtype))
                    yield Trial("MatrixDiagPartV3", part, (x,))
                    for low, up in ((-1, 0), (0, -1), (1, 1)):
                        band = lambda t, a=low, b=up: _raw.MatrixBandPart(input=t, num_lower=a, num_upper=b)
                        yield Trial("MatrixBandPart", band, (x,))


def _raw_triangular(lower: bool, adjoint: bool, m: Any, r: Any) -> Any:
    return _raw.MatrixTriangularSolve(matrix=m, rhs=r, lower=lower, adjoint=adjoint)


def transforms() -> Iterator[Trial]:
    for dimensions, suffix in ((1, ""), (2, "2D"), (3, "3D")):
        for rank in range(dimensions, 5):
            for kind in ("", "1"):
                for dtype in COMPLEX:
                    for x in given(rank, dtype, kind):
                        for op in ("FFT", "IFFT"):
                            yield Trial(op + suffix, lambda t, op=op + suffix: getattr(_raw, op)(input=t), (x,))
                real = partial(_transform, "RFFT" + suffix, [*shape_of(rank, kind, 0)[rank - dimensions :]])
                for x in given(rank, "float32", kind, turn=0):
                    yield Trial("RFFT" + suffix, real, (x,))
                back = partial(_transform, "IRFFT" + suffix, [4] * dimensions)
                for x in given(rank, "complex64", kind, turn=0):
                    yield Trial("IRFFT" + suffix, back, (x,))


def _transform(op: str, length: list[int], x: Any) -> Any:
    return getattr(_raw, op)(input=x, fft_length=tf.constant(length))


def neural() -> Iterator[Trial]:
    for dtype in FLOATS:
        for rank in range(1, 5):
            for kind in kinds_of(rank):
                for x in given(rank, dtype, kind):
                    for op in ("Softmax", "LogSoftmax"):
                        yield Trial(op, lambda t, op=op: getattr(_raw, op)(logits=t), (x,))
                    yield Trial("LeakyRelu", lambda t: _raw.LeakyRelu(features=t, alpha=0.3), (x,))
                    yield Trial("CheckNumerics", lambda t: _raw.CheckNumerics(tensor=t, message="here"), (x,))
                    yield Trial(
                        "ClipByValue", lambda t: _raw.ClipByValue(t=t, clip_value_min=tf.cast(0.1, t.dtype),
                                                                  clip_value_max=tf.cast(0.5, t.dtype)), (x,)
                    )  # fmt: skip
                    yield Trial("AddN", lambda t: _raw.AddN(inputs=[t, t, t]), (x,))
                    for b in (x, Input(x.shape, dtype, False)) if not x.unknown else (x,):
                        yield Trial("AddN", lambda t, u: _raw.AddN(inputs=[t, u]), (x, b))
            for k in (1, 2):
                for s in (True, False):
                    top = lambda t, k=k, s=s: _raw.TopKV2(input=t, k=tf.constant(k), sorted=s)
                    yield Trial("TopKV2", top, (Input(shape_of(rank), dtype),))
        for data_format, rank in itertools.product(("NHWC", "NCHW"), (2, 3, 4)):
            for kind, turn in itertools.product(KINDS, range(rank)) if many(dtype) else (("", 0),):
                for x, (s, t) in itertools.product(given(rank, dtype, kind, turn=turn), STACKINGS):
                    if s or not x.unknown:
                        channels = x.shape[-1] if data_format == "NHWC" else x.shape[1]
                        add = lambda v, b, f=data_format: _raw.BiasAdd(value=v, bias=b, data_format=f)
                        value, bias = Input(x.shape, dtype, s, x.unknown), Input((channels,), dtype, t, t and x.unknown)
                        yield Trial("BiasAdd", add, (value, bias))
        for rows, classes in itertools.product((1, 3), (1, 4)):
            for s, t in ((True, True), (True, False), (False, True)):
                both = (Input((rows, classes), dtype, s), Input((rows, classes), dtype, t))
                loss = lambda x, y: _raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y)
                yield Trial("SoftmaxCrossEntropyWithLogits", loss, both)
                for other in ((1, classes), (rows, 1)):
                    yield Trial(
                        "SoftmaxCrossEntropyWithLogits",
                        loss,
                        (Input((rows, classes), dtype, s), Input(other, dtype, t)),
                    )
                for index in ("int32", "int64"):
                    labels = Input((rows,), index, t, values=_indices(classes))
                    loss_of = lambda x, y: _raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y)
                    yield Trial(
                        "SparseSoftmaxCrossEntropyWithLogits", loss_of, (Input((rows, classes), dtype, s), labels)
                    )
    yield from _convolutions()


def _convolutions() -> Iterator[Trial]:
    for dtype in ("float32", "float64", "float16"):
        for batch, padding, stride, dilation in itertools.product((1, 2), ("SAME", "VALID"), (1, 2), (1, 2)):
            image = (batch, 7, 6, 3)
            for s, t in ((True, False), (True, True), (False, True)):
                both = Input(image, dtype, s), Input((3, 2, 3, 4), dtype, t)
                strides, dilations = [1, stride, stride, 1], [1, dilation, dilation, 1]
                conv = lambda x, f, p=padding, s=strides, d=dilations: _raw.Conv2D(
                    input=x, filter=f, strides=s, padding=p, dilations=d)  # fmt: skip
                yield Trial("Conv2D", conv, both)
                deep = Input(image, dtype, s), Input((3, 2, 3, 2), dtype, t)
                depthwise = lambda x, f, p=padding, s=strides, d=dilations: _raw.DepthwiseConv2dNative(
                    input=x, filter=f, strides=s, padding=p, dilations=d)  # fmt: skip
                yield Trial("DepthwiseConv2dNative", depthwise, deep)
            for op, name in (("MaxPool", "input"), ("AvgPool", "value")):
                pool = partial(_pool, op, name, padding, stride)
                yield Trial(op, pool, (Input(image, dtype),))
        for op in ("DepthToSpace", "SpaceToDepth"):
            move = lambda x, op=op: getattr(_raw, op)(input=x, block_size=2)
            yield Trial(op, move, (Input((2, 4, 6, 8), dtype),))


def _pool(op: str, name: str, padding: str, stride: int, x: Any) -> Any:
    return getattr(_raw, op)(**{name: x}, ksize=[1, 2, 3, 1], strides=[1, stride, stride, 1], padding=padding)


def segments() -> Iterator[Trial]:
    for op, dtype, index in itertools.product(("Sum", "Max", "Min", "Prod"), ("float32", "int32"), ("int32", "int64")):
        for s, t in ((True, True), (True, False), (False, True)):
            for ids in (_indices(3), lambda random, shape, dtype: random.integers(-1, 5, shape).astype(dtype)):
                call = lambda x, i, op="UnsortedSegment" + op: getattr(_raw, op)(
                    data=x, segment_ids=i, num_segments=tf.constant(3))  # fmt: skip
                yield Trial("UnsortedSegment" + op, call, (Input((4, 2), dtype, s), Input((4,), index, t, values=ids)))
    for op, dtype in itertools.product(("LowerBound", "UpperBound"), ("float32", "int32")):
        for s, t in ((True, True), (True, False), (False, True)):
            ordered = lambda random, shape, dtype: np.sort(random.integers(0, 9, shape), -1).astype(dtype)
            both = Input((2, 5), dtype, s, values=ordered), Input((2, 3), dtype, t)
            yield Trial(op, lambda x, v, op=op: getattr(_raw, op)(sorted_inputs=x, values=v), both)


def lists() -> Iterator[Trial]:
    for dtype in COMMON:
        for rank in range(1, 5) if many(dtype) else range(1, 4):
            for kind in kinds_of(rank) if many(dtype) else ("",):
                for x in itertools.chain(given(rank, dtype, kind), given(rank, dtype, kind, turn=0)):
                    yield Trial("TensorListFromTensor TensorListStack Identity", _restacked, (x,))
                    yield Trial("TensorListFromTensor TensorListLength", lambda t: _unstacked(t).size(), (x,))
                    if x.shape[0]:
                        for place in {0, 1 % x.shape[0], x.shape[0] - 1}:
                            read = lambda t, place=place: _unstacked(t).read(place)
                            yield Trial("TensorListFromTensor TensorListGetItem", read, (x,))
                        gather = lambda t, n=x.shape[0]: _unstacked(t).gather([n - 1, 0])
                        yield Trial("TensorListFromTensor TensorListGather", gather, (x,))
                        at = Input((), "int32", values=_indices(x.shape[0]))
                        yield Trial("TensorListGetItem", lambda t, i: _unstacked(t).read(i), (x, at))
    yield from _written_lists()


def _unstacked(x: Any) -> Any:
    return tf.TensorArray(x.dtype, tf.shape(x)[0] if x.shape[0] is None else x.shape[0]).unstack(x)


def _restacked(x: Any) -> Any:
    return _unstacked(x).identity().stack()


def _written_lists() -> Iterator[Trial]:
    """Lists that are written element by element: all of them, some, or none."""
    row = Input((), "float32")
    for dtype in (*COMMON, "bool", "string", "float16", "complex64"):
        for rank in range(4) if many(dtype) else (0, 2):
            for kind, stacked in itertools.product(kinds_of(rank) if many(dtype) else ("",), (True, False)):
                for x in given(rank, dtype, kind, stacked):
                    known = [None if x.unknown else each for each in x.shape]
                    # What is not told of an element's shape is learnt from those that are written.
                    in_part = [[None, *known[1:]]] if rank else []
                    for element in (known, None, *in_part):
                        whole = element is not None and None not in element
                        for places in ((0, 1, 2), (2, 0), *(((1,), ()) if whole else ())):
                            fill = partial(_filled, element, places)
                            every = "TensorListReserve TensorListSetItem TensorListStack TensorListLength"
                            yield Trial(every, partial(_read_all, fill), (x, row))
                            if places == (0, 1, 2):
                                yield Trial(every, partial(_read_all, partial(fill, grows=True)), (x, row))
                            if 2 in places or whole:
                                yield Trial("TensorListGetItem", lambda t, r, fill=fill: fill(t, r).read(2), (x, row))
                                gather = lambda t, r, fill=fill: fill(t, r).gather([2, 0])
                                yield Trial("TensorListGather", gather, (x, row))
        for rank in range(1, 4) if many(dtype) else (2,):
            for x, stacked in itertools.product(given(rank, dtype), STACKINGS):
                both = (Input(x.shape, dtype, stacked[0]), Input(x.shape[1:], dtype, stacked[1]))
                yield Trial("TensorListSetItem TensorListStack", _overwritten, both)


def _read_all(fill: Callable[..., Any], x: Any, row: Any) -> Any:
    filled = fill(x, row)
    return [filled.stack(), filled.size()]


def _filled(element_shape: Any, places: Sequence[int], x: Any, row: Any, grows: bool = False) -> Any:
    del row  # there is always something that differs between rows
    size = 0 if grows else 3
    filled = tf.TensorArray(x.dtype, size, grows, element_shape=element_shape, clear_after_read=False)
    for place in places:
        filled = filled.write(place, x)
    return filled


def _overwritten(x: Any, element: Any) -> Any:
    return tf.TensorArray(x.dtype, x.shape[0]).unstack(x).write(1 % x.shape[0], element).stack()


def draws() -> Iterator[Trial]:
    x = Input((), "float32")
    for rank in range(4):
        shape = tf.constant(shape_of(rank), tf.int32)
        for dtype in ("float32", "float64", "float16"):
            for op in ("RandomUniform", "RandomStandardNormal", "TruncatedNormal"):
                draw = lambda x, op=op, s=shape, d=dtype: getattr(_raw, op)(shape=s, dtype=tf.as_dtype(d))
                yield Trial(op, draw, (x,), random=True)
        for dtype in ("int32", "int64"):
            whole = lambda x, s=shape, d=dtype: _raw.RandomUniformInt(
                shape=s, minval=tf.constant(0, d), maxval=tf.constant(9, d))  # fmt: skip
            yield Trial("RandomUniformInt", whole, (x,), random=True)


def seeded_draws() -> Iterator[Trial]:
    """Of a seed in each row: the numbers are those of the row by itself."""
    seed = Input((2,), "int32", values=lambda random, shape, dtype: random.integers(0, 999, shape).astype(dtype))
    low, high = (
        Input((), "int32", values=lambda _, shape, dtype: np.full(shape, -3, dtype)),
        Input((), "int32", values=lambda _, shape, dtype: np.full(shape, 9, dtype)),
    )
    for rank in range(4):
        shape = shape_of(rank)
        for dtype in FLOATS:
            for op, draw in _DRAWS.items():
                of = lambda s, draw=draw, d=dtype, shape=shape: draw(shape, s, dtype=tf.as_dtype(d))
                yield Trial(f"StatelessRandomGetKeyCounter {op}", of, (seed,))
        for dtype in ("int32", "int64"):
            whole = lambda s, d=dtype, shape=shape: tf.random.stateless_uniform(
                shape, s, minval=tf.constant(-3, d), maxval=tf.constant(9, d), dtype=tf.as_dtype(d))  # fmt: skip
            yield Trial("StatelessRandomGetKeyCounter StatelessRandomUniformIntV2", whole, (seed,))
            full = lambda s, d=dtype, shape=shape: tf.random.stateless_uniform(
                shape, s, minval=None, maxval=None, dtype=tf.as_dtype(d))  # fmt: skip
            yield Trial("StatelessRandomGetKeyCounter StatelessRandomUniformFullIntV2", full, (seed,))
        between = lambda s, a, b, shape=shape: tf.random.stateless_uniform(shape, s, a, b, tf.int32)
        yield Trial("StatelessRandomUniformIntV2", between, (seed, low, high))


_DRAWS: dict[str, Callable[..., Any]] = {
    "StatelessRandomUniformV2": tf.random.stateless_uniform,
    "StatelessRandomNormalV2": tf.random.stateless_normal,
    "StatelessTruncatedNormalV2": tf.random.stateless_truncated_normal,
}


ALIKE = dict.fromkeys(UNARY, "Neg") | dict.fromkeys(BINARY, "AddV2") | dict.fromkeys(COMPARING, "Equal")
"""Ops that TensorFlow vectorises by one rule, and one of them. The rule is tried in every form on that one, which stands for
those that others are not tried in; they are tried in some forms with every dtype."""


def every_form(op: str) -> Iterator[Trial]:
    """Of one of these."""
    return (unary if op == "Neg" else comparing if op == "Equal" else binary)(op, full=True)


def read_parameters() -> Iterator[Trial]:
    """How to compute is only known when it runs: it is read from a variable."""
    for dtype in (*COMMON, "bool", "float16", "complex64", "string"):
        for rank in range(5) if many(dtype) else (0, 2):
            for kind in kinds_of(rank) if many(dtype) else ("",):
                for x in given(rank, dtype, kind):
                    size = int(np.prod(x.shape))
                    flat, more = tf.Variable([size]), tf.Variable([2, *x.shape])
                    yield Trial("Reshape", lambda t, v=flat: _raw.Reshape(tensor=t, shape=v.read_value()), (x,))
                    yield Trial("BroadcastTo", lambda t, v=more: _raw.BroadcastTo(input=t, shape=v.read_value()), (x,))
                    if rank and x.shape[0] and x.shape[-1]:
                        zero, one_more = tf.Variable(0), tf.Variable(x.shape[0] - 1)
                        for sliced in _SLICES[: 4 if rank == 1 else None]:
                            read = lambda t, f=sliced, i=zero, j=one_more: f(t, i.read_value(), j.read_value())
                            yield Trial("StridedSlice", read, (x,))
                    if rank:
                        twice, last, one = tf.Variable([2] * rank), tf.Variable([rank - 1]), tf.Variable(1)
                        yield Trial("Tile", lambda t, v=twice: _raw.Tile(input=t, multiples=v.read_value()), (x,))
                        if dtype in COMMON:
                            for op, keep in itertools.product(("Sum", "Max", "Mean"), (True, False)):
                                yield Trial(op, partial(_reduce_read, op, keep, last), (x,))
                            if x.shape[-1]:
                                top = lambda t, v=one: _raw.TopKV2(input=t, k=v.read_value(), sorted=True)
                                yield Trial("TopKV2", top, (x,))


_SLICES: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda t, i, j: t[j],
    lambda t, i, j: t[i:j],
    lambda t, i, j: t[j:],
    lambda t, i, j: t[:j],
    lambda t, i, j: t[j, i],
    lambda t, i, j: t[j, :],
    lambda t, i, j: t[:, i],
    lambda t, i, j: t[..., i],
    lambda t, i, j: t[i, ..., i],
    lambda t, i, j: t[j][None],
    lambda t, i, j: t[j, None],
)


def _reduce_read(op: str, keep: bool, axis: Any, x: Any) -> Any:
    return getattr(_raw, op)(input=x, axis=axis.read_value(), keep_dims=keep)


def others() -> Iterator[Trial]:
    for rank in range(3):
        x = Input(shape_of(rank), "float32")
        for s in (True, False):
            checked = Input((), "float32", s)
            for data in (True, False):
                yield Trial("Assert", partial(_asserted, data), (x, checked))
        scalar = Input((), "int32", False)
        yield Trial("IdentityN", lambda t, u: _raw.IdentityN(input=[t, u]), (x, scalar))
    for dtype in COMMON:
        for s, t in STACKINGS:
            yield Trial("Cross", lambda a, b: _raw.Cross(a=a, b=b), (Input((3,), dtype, s), Input((3,), dtype, t)))
            update = lambda x, u, i=((0,), (2,)): _raw.TensorScatterUpdate(tensor=x, indices=tf.constant(i), updates=u)
            yield Trial("TensorScatterUpdate", update, (Input((4,), dtype, s), Input((2,), dtype, t)))


def _asserted(data: bool, x: Any, checked: Any) -> Any:
    told = [tf.constant("text"), checked] if data else [tf.constant("text")]
    with tf.control_dependencies([_raw.Assert(condition=checked < 1e9, data=told)]):
        return tf.identity(x)


FAMILIES: dict[str, Callable[[], Iterator[Trial]]] = {
    "unary": lambda: itertools.chain.from_iterable(map(unary, UNARY)),
    "binary": lambda: itertools.chain.from_iterable(map(binary, BINARY)),
    "comparing": lambda: itertools.chain.from_iterable(map(comparing, COMPARING)),
    "every form": lambda: itertools.chain.from_iterable(map(every_form, dict.fromkeys(ALIKE.values()))),
    "reductions": lambda: itertools.chain.from_iterable(map(reductions, REDUCTIONS)),
    "casts": casts,
    "selects": selects,
    "along an axis": along_an_axis,
    "shaping": shaping,
    "transposing": transposing,
    "gathering": gathering,
    "matrix products": matrix_products,
    "batch matrix products": batch_matrix_products,
    "contractions": contractions,
    "linear algebra": linear_algebra,
    "transforms": transforms,
    "neural": neural,
    "segments": segments,
    "lists": lists,
    "draws": draws,
    "seeded draws": seeded_draws,
    "read parameters": read_parameters,
    "others": others,
}
