"""What the ops of a traced function allocate for so many rows: graphs -> numbers for `liveness`. Nothing runs but constants.

A sketch of the graph is built for a number of rows, in which TensorFlow infers the shapes anew; functions are inlined, and
integers that depend on nothing but shapes are computed, as they are when TensorFlow folds constants.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import functions_within, registered_kernels
from devicemap.base.devices import kind_of
from devicemap.compile.cost.constants import LARGEST_CONSTANT, TensorList, Value, folded, is_view, run_now, zeros
from devicemap.compile.cost.liveness import Body, Op, needed, peak_bytes
from devicemap.compile.cost.walk import called_by, lasting_variables, needed_in
from devicemap.compile.kernels import are_named, dtypes_of, instead_of_int32, kernel_for

_ROWS = (1024, 2048)
"""Rows that are compared: what a row takes is the difference. Many, so that what does not grow with them is no peak."""

_ALIGNMENT = {"CPU": 64}
"""Allocations are multiples of so many bytes; on all other devices of 256, the smallest that TensorFlow's allocator makes."""

_IN_PLACE = frozenset(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd BiasAddV1 BitwiseAnd "
    "BitwiseOr BitwiseXor Ceil Cholesky ClipByValue Conj Cos Cosh Digamma Div DivNoNan Elu Erf Erfc Erfinv Exp Expm1 "
    "Floor FloorDiv FloorMod FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Igamma Igammac Inv Invert LeakyRelu "
    "Lgamma Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr MatrixBandPart MatrixInverse MatrixSetDiag "
    "MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter Polygamma Pow "
    "RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Softmax Softplus "
    "Softsign Sqrt Square SquaredDifference Sub Tan Tanh TensorScatterAdd TensorScatterMax TensorScatterMin "
    "TensorScatterSub TensorScatterUpdate TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta".split()
)
"""Ops whose kernels write over an input that nobody else needs."""


_HOLDERS = frozenset("TensorListSetItem TensorListPushBack RaggedTensorToVariant".split())
"""Ops that give something that holds the tensors that they take."""

_READS = frozenset("ReadVariableOp ResourceGather ResourceGatherNd VarHandleOp Placeholder".split())
"""Stateful ops that do nothing that anybody sees."""


class UnknownSizeError(Exception):
    """The size of something cannot be told before it runs."""


_NOTHING = Value(0, None)
"""Stands for results of functions that nobody needs."""


def _own_outputs(traced: Any) -> set[int]:
    """Which outputs of its graph are its results: behind them come those that its gradients need."""
    return {*range(len(tf.nest.flatten(traced.concrete.structured_outputs, expand_composites=True)))}


def memory_bytes_per_row(traced: Any, kind: str, row_lengths: Mapping[int, Sequence[Any]]) -> int | None:
    """What one more row of a shard adds to the most memory that is taken at once on a device of a kind.

    Args:
        traced: the `Traced` function; a shard is in the device's memory first, and results leave as soon as they are there.
        kind: of the device.
        row_lengths: as `Asked.row_lengths`.

    Returns:
        Bytes, or `None` where a shape is not known before it runs.
    """
    try:
        few, many = (_Sketch(traced.concrete.graph, kind).peak_bytes(traced, row_lengths, n) for n in _ROWS)
    except Exception:  # of any kind: whatever a sketch of a function does not know, a figure is not worth a call
        return None
    return math.ceil((many - few) / (_ROWS[1] - _ROWS[0]))


@dataclass(frozen=True)
class Crossing:
    """A tensor that goes from the memory of a device to the host's, or back."""

    what: str
    """The op that makes it on the host, or that takes it there, or something captured."""

    to_device: bool

    size_bytes: int | None
    """Of all times; `None` where it cannot be told."""


@dataclass(frozen=True)
class Crossings:
    """What goes between a device's memory and the host's in a call on so many rows."""

    arriving: tuple[bool, ...]
    """For each leaf of the data, whether it goes to the device's memory."""

    leaving: tuple[bool, ...]
    """For each leaf of the results, whether it comes from there."""

    others: tuple[Crossing, ...]

    int32: Mapping[str, str]
    """Ops on int32 of the rows that the host computes, and a dtype that the device computes each on."""


def crossings(
    traced: Any,
    kind: str,
    row_lengths: Mapping[int, Sequence[Any]],
    rows: int,
    away: Mapping[int, str],
    hosted: Collection[int],
) -> Crossings | None:
    """What goes between the memory of a device of a kind and the host's, `None` where that cannot be told.

    Args:
        traced: the `Traced` function.
        kind: of the device.
        row_lengths: as `Asked.row_lengths`.
        rows: how many the device gets.
        away: names of what is captured and used on the host, by its position.
        hosted: positions of what is captured and lies on the host besides.
    """
    try:
        return _Sketch(traced.concrete.graph, kind).crossings_of(traced, row_lengths, rows, away, hosted)
    except Exception:  # of any kind: whatever a sketch of a function does not know, a figure is not worth a call
        return None


@dataclass
class _Sketch:
    """A graph for a number of rows."""

    source: Any
    kind: str
    ops: list[Op] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self._graph = tf.Graph()
        self._functions = functions_within(self.source)
        self._copies: dict[int, Value] = {}
        self._kernels_of = cache(registered_kernels)
        self._unsized: set[int] = set()
        self._crossed: list[tuple[Op | None, Crossing]] = []
        self._left: set[int] = set()
        self._away: dict[int, str] = {}
        self._rows: set[int] = set()
        self._int32: dict[str, str] = {}
        self._count_of_rows: int | None = None

    def crossings_of(
        self,
        traced: Any,
        row_lengths: Mapping[int, Sequence[Any]],
        rows: int,
        away: Mapping[int, str],
        hosted: Collection[int],
    ) -> Crossings:
        parts = [_of_rows(spec, row_lengths.get(i), rows) for i, spec in enumerate(traced.input_specs)]
        given = [[replace(self._arriving(*part), on_host=True) for part in leaf] for leaf in parts]
        flat = [value for leaf in given for value in leaf]
        inside = self.source.inputs[len(flat) :]
        captured = [self._value(self._unknown(t), on_host=i in away or i in hosted) for i, t in enumerate(inside)]
        self._away = {captured[i].number: name for i, name in away.items()}
        self._rows = {value.number for value in flat}
        self._count_of_rows = rows
        ends = self._run(self.source, [*flat, *captured], _own_outputs(traced))
        results = iter(ends)
        leaving = []
        for leaf in traced.concrete.structured_outputs:
            parts_of_leaf = [next(results) for _ in tf.nest.flatten(leaf, expand_composites=True)]
            leaving.append(not all(end.on_host for end in parts_of_leaf))
        ops = needed(self.ops, [end.number for end in ends])
        made = {number for op in ops for number, _ in op.makes}
        sent = {number for number, copy in self._copies.items() if copy.number in made}
        arriving = [any(value.number in sent for value in leaf) for leaf in given]
        return Crossings(tuple(arriving), tuple(leaving), tuple(self._crossed_by(ops)), self._int32)

    def _crossed_by(self, ops: Sequence[Op]) -> list[Crossing]:
        """What these ops let go from memory to memory. Rows that come are not counted: they have no maker."""
        ids = {id(op) for op in ops}
        return [each for op, each in self._crossed if id(op) in ids and each.what]

    def _passes_on_host(self, dtype: Any) -> bool:
        """Whether what a function is given and gives is in the host's memory."""
        identity = kernel_for(self._kernels_of("Identity"), self.kind, {"T": [dtype.as_datatype_enum]})
        return self.kind != "CPU" and (identity is None or bool(identity.on_host))

    def _cross(self, value: Value, what: str, to_device: bool) -> None:
        """Note that a tensor goes from memory to memory."""
        shape, dtype = value.tensor.shape, value.tensor.dtype
        if dtype not in (tf.resource, tf.variant, tf.string):
            size = int(shape.num_elements()) * int(dtype.size) if shape.is_fully_defined() else None
            self._crossed.append((None, Crossing(what, to_device, size)))

    def _note_op(self, op: Op) -> None:
        """An op, which what crossed last was for."""
        self.ops.append(op)
        self._crossed = [(op if known is None else known, each) for known, each in self._crossed]

    def _to_host(self, value: Value, what: str) -> None:
        """An op takes a tensor of the device on the host; others may have done so before."""
        if not value.on_host and value.number not in self._left:
            self._left.add(value.number)
            self._cross(value, what, to_device=False)

    def peak_bytes(self, traced: Any, row_lengths: Mapping[int, Sequence[Any]], rows: int) -> int:
        leaves = [t for i, spec in enumerate(traced.input_specs) for t in _of_rows(spec, row_lengths.get(i), rows)]
        given = [self._arriving(*leaf) for leaf in leaves]
        captured = [self._value(self._unknown(t), on_host=True) for t in self.source.inputs[len(given) :]]
        results = [
            end for end in self._run(self.source, [*given, *captured], _own_outputs(traced)) if end is not _NOTHING
        ]
        sizes = {value.number: self._bytes(value) for value in given} | {value.number: 0 for value in captured}
        kept = [value.number for value in results]
        ops = needed(self.ops, kept)
        if self._unsized & {value for value, _ in _made_by(ops)}:
            raise UnknownSizeError
        return peak_bytes(ops, sizes, ())

    def _arriving(self, shape: Any, dtype: Any, known: Any) -> Value:
        tensor = self._unknown(tf.TensorSpec(shape, dtype)) if known is None else self._constant(known)
        return self._value(tensor, on_host=self._passes_on_host(dtype), known=known)

    def _value(self, tensor: Any, **facts: Any) -> Value:
        self.count += 1
        return Value(self.count, tensor, **facts)

    def _again(self, value: Value) -> Value:
        """What stands for it in a graph that an op runs."""
        self.count += 1
        if value.number in self._away:
            self._away[self.count] = self._away[value.number]
        return replace(value, number=self.count)

    def _unknown(self, like: Any) -> Any:
        """A tensor of the sketch with the dtype and the shape of another one."""
        with self._graph.as_default():
            return tf.compat.v1.placeholder(like.dtype, like.shape)

    def _constant(self, known: Any) -> Any:
        with self._graph.as_default():
            return tf.constant(known)

    def _bytes(self, value: Value) -> int:
        """What a tensor takes on the device."""
        shape, dtype = value.tensor.shape, value.tensor.dtype
        if value.on_host or dtype == tf.resource or value.listed is not None:
            return 0
        if dtype in (tf.string, tf.variant) or not shape.is_fully_defined():
            self._unsized.add(value.number)
            return 0
        return self._aligned(int(shape.num_elements()) * int(dtype.size))

    def _aligned(self, size: float) -> int:
        alignment = _ALIGNMENT.get(self.kind, 256)
        return math.ceil(size / alignment) * alignment

    def _run(self, graph: Any, arguments: Sequence[Value], kept: Collection[int] | None = None) -> list[Value]:
        """Run a function's graph, here, for all of its results or for those that are `kept`: gradients add others."""
        ends = [tensor for i, tensor in enumerate(graph.outputs) if kept is None or i in kept]
        values = {tensor.name: value for tensor, value in zip(graph.inputs, arguments)}
        needed, names = needed_in(graph, ends), {tensor.name for tensor in ends}
        waiting = [
            op for op in graph.get_operations() if op in needed and not (op.outputs and op.outputs[0].name in values)
        ]
        while waiting:  # once, unless ops were put before others that there were already
            later = []
            for op in waiting:
                if not all(tensor.name in values for tensor in op.inputs):
                    later.append(op)
                    continue
                takers = [(t.name in names, t.consumers()) for t in op.outputs]
                used = {i for i, (ends_here, by) in enumerate(takers) if ends_here or any(t in needed for t in by)}
                results = self._of_op(op, [values[tensor.name] for tensor in op.inputs], used)
                values |= {tensor.name: value for tensor, value in zip(op.outputs, results)}
            if len(later) == len(waiting):
                raise UnknownSizeError(later[0].name)
            waiting = later
        return [values.get(tensor.name, _NOTHING) for tensor in graph.outputs]

    def _of_op(self, op: Any, taken: list[Value], used: set[int]) -> Sequence[Value]:
        """What an op gives; of its outputs some are `used`."""
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            return self._run(self._function(op, "f"), taken, used)
        if op.type in ("While", "StatelessWhile"):
            return self._loop(op, taken, used)
        if op.type in ("If", "StatelessIf", "Case", "StatelessCase"):
            return self._branches(op, taken)
        if op.type == "Identity" or (
            op.type == "Reshape" and taken[0].tensor.shape.rank == op.outputs[0].shape.rank == 0
        ):
            return taken[:1]  # TensorFlow takes it out
        known = folded(op, taken) or [None] * len(op.outputs)
        taken_on_host, made_on_host = self._in_host_memory(op)
        name = next((self._away[value.number] for value in taken if value.number in self._away), op.type)
        if name != op.type or kind_of(op.device) == "CPU" != self.kind:
            taken_on_host, made_on_host = [True] * len(op.inputs), [True] * len(op.outputs)
        # What is made of constants alone, TensorFlow computes once.
        constant = bool(known) and known[0] is not None and all(value.constant for value in taken)
        if constant:
            taken_on_host = [value.on_host for value in taken]
        for value, on_host in zip(taken, taken_on_host):
            if on_host:
                self._to_host(value, name)
        taken = [value if on_host else self._on_device(value) for value, on_host in zip(taken, taken_on_host)]
        results = [*map(self._constant, known)] if known and known[0] is not None else self._shapes(op, taken)
        if op.type in _ON_LISTS:
            return self._on_list(op, taken, results, made_on_host)
        if is_view(op, taken, results):
            viewed = taken if op.type == "IdentityN" else [taken[-1 if op.type == "Split" else 0]] * len(results)
            return [replace(view, tensor=result, known=k) for view, result, k in zip(viewed, results, known)]
        if all(made_on_host) and all(each is None for each in known) and any(map(self._is_of_rows, results)):
            instead = instead_of_int32(self._kernels_of(op.type), self.kind, dtypes_of(op))
            self._int32 |= {} if instead is None else {op.type: instead}
        values = zip(results, made_on_host, known)
        return self._make(
            op, taken, [self._value(r, on_host=h, known=k, maker=name, constant=constant) for r, h, k in values]
        )

    def _make(
        self, op: Any, taken: Iterable[Value], made: Sequence[Value], sizes: Sequence[int] | None = None
    ) -> Sequence[Value]:
        """Note what an op allocates."""
        sizes = [self._bytes(value) for value in made] if sizes is None else sizes
        takes = tuple(value.number for value in taken)
        views = op.type in _HOLDERS and not made[0].on_host
        makes = tuple((value.number, size) for value, size in zip(made, sizes))
        acts = op.op_def.is_stateful and op.type not in _READS
        self._note_op(Op(takes, makes, views, op.type in _IN_PLACE, acts))
        return made

    def _on_device(self, value: Value) -> Value:
        """A tensor in the device's memory."""
        if not value.on_host or value.listed is not None or value.tensor.dtype in (tf.resource, tf.string, tf.variant):
            return value
        if value.number not in self._copies:
            self._cross(value, value.maker, to_device=True)
            copy = self._value(value.tensor, known=value.known)
            self._copies[value.number] = copy
            self._note_op(Op((value.number,), ((copy.number, self._bytes(copy)),)))
        return replace(self._copies[value.number], tensor=value.tensor)

    def _is_of_rows(self, result: Any) -> bool:
        """Whether an op that is not folded gives something for each row: folded are those on shapes and on constants."""
        return self._count_of_rows is not None and (result.shape.num_elements() or 0) >= self._count_of_rows

    def _in_host_memory(self, op: Any) -> tuple[list[bool], list[bool]]:
        """Which of the tensors that an op takes and gives are in the host's memory."""
        if self.kind == "CPU":
            return [False] * len(op.inputs), [False] * len(op.outputs)
        kernel = kernel_for(self._kernels_of(op.type), self.kind, dtypes_of(op))
        if kernel is None:
            return [True] * len(op.inputs), [True] * len(op.outputs)
        return are_named(op, op.op_def.input_arg, kernel.on_host), are_named(op, op.op_def.output_arg, kernel.on_host)

    def _shapes(self, op: Any, taken: Sequence[Value]) -> list[Any]:
        """The op in the sketch, or what stands for it: tensors of the shapes that it gives."""
        attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
        dtypes = [output.dtype for output in op.outputs]
        try:
            if called_by(op):
                raise ValueError("calls a function that the sketch lacks")
            made = self._graph.create_op(op.type, [v.tensor for v in taken], dtypes, attrs=attributes).outputs
        except (ValueError, tf.errors.OpError):
            made = [self._unknown(output) for output in op.outputs]
        if op.type in ("ResourceGather", "LookupTableFindV2"):  # handles in the sketch do not know what they are of
            indices = taken[1].tensor.shape
            made = [
                self._unknown(tf.TensorSpec(indices.concatenate(op.outputs[0].shape[indices.rank :]), made[0].dtype))
            ]
        if op.type.startswith("Ragged") and not all(tensor.shape.is_fully_defined() for tensor in made):
            given = [v.known if v.known is not None else zeros(v.tensor) for v in taken]
            results = None if any(each is None for each in given) else run_now(op, given)
            made = made if results is None else [self._unknown(result) for result in results]
        for tensor, output in zip(made, op.outputs):
            if tensor.shape.is_compatible_with(output.shape):
                tensor.set_shape(output.shape)
        return list(made)

    def _on_list(
        self, op: Any, taken: Sequence[Value], results: Sequence[Any], hosted: Sequence[bool]
    ) -> Sequence[Value]:
        """An op on a list of tensors, which holds what is written into it, and gives it without a copy.

        A ragged tensor as one element is a list of one, too.
        """
        result, on_host = results[0], hosted[0]

        def made_list(listed: TensorList, size: int = 0) -> Sequence[Value]:
            return self._make(
                op, taken, [self._value(result, on_host=on_host, listed=listed)], [0 if on_host else size]
            )

        if op.type in ("TensorListReserve", "EmptyTensorList"):
            length = None if op.type == "EmptyTensorList" else taken[1].known
            return made_list(TensorList(None if length is None else int(length)))
        if op.type in ("TensorListFromTensor", "TensorListSplit"):
            listed = self._pieces(taken, op.type == "TensorListSplit")
            return made_list(listed, (listed.length or 0) * listed.element_bytes)
        if op.type == "RaggedTensorToVariant":
            return made_list(TensorList(1, taken[-1].tensor.shape, sum(self._bytes(value) for value in taken)))
        listed = taken[0].listed or TensorList(None)
        if op.type in ("TensorListSetItem", "TensorListPushBack"):
            item = taken[-1]
            listed.shape = item.listed.shape if item.listed else item.tensor.shape
            listed.element_bytes = self._held(item)
            return made_list(listed)
        if op.type == "TensorListGetItem":
            return [replace(taken[0], tensor=_shaped(result, listed.shape), listed=None)]
        if op.type == "TensorListStack" and result.dtype == tf.variant:
            return [replace(taken[0], tensor=result)]
        shape = None if listed.shape is None or listed.shape.rank is None else [listed.length, *listed.shape]
        if shape is not None and op.type == "TensorListGather":
            shape[:1] = taken[1].tensor.shape
        elif shape is not None and op.type != "TensorListStack":  # they are joined
            shape[:2] = [shape[0] and shape[1] and shape[0] * shape[1]]
        shapes = [shape, *[None] * (len(results) - 1)]
        if op.type == "RaggedTensorFromVariant":
            shapes = [None if listed.length is None else [listed.length + 1], *shapes[1:-1], shape]
        parts = zip(results, shapes, hosted)
        return self._make(op, taken, [self._value(_shaped(part, s), on_host=h) for part, s, h in parts])

    def _pieces(self, taken: Sequence[Value], of_lengths: bool) -> TensorList:
        """A list of copies of the rows of a tensor, or of pieces of many rows, of which the mean length counts."""
        shape = taken[0].tensor.shape
        lengths = taken[2].known if of_lengths else None
        if not shape.is_fully_defined():
            return TensorList(None)
        row_bytes = int(shape[1:].num_elements()) * int(taken[0].tensor.dtype.size)
        if not of_lengths:
            return TensorList(int(shape[0]), shape[1:], self._aligned(row_bytes))
        if lengths is None:
            return TensorList(None)
        size = sum(self._aligned(int(length) * row_bytes) for length in lengths)
        mean = tf.TensorShape([round(float(np.mean(lengths)))])
        return TensorList(len(lengths), mean.concatenate(shape[1:]), size // len(lengths))

    def _function(self, op: Any, attribute: str) -> Any:
        return self._graph_of(op.get_attr(attribute).name)

    def _graph_of(self, name: str) -> Any:
        graph, _ = self._functions.get(name, (None, False))
        if graph is None:
            raise UnknownSizeError(name)
        return graph

    def _inside(
        self, graph: Any, arguments: Sequence[Value], kept: Collection[int] | None = None
    ) -> tuple[list[Op], list[Value]]:
        """Run a function's graph apart from the ops around it."""
        around = self.ops, self._copies, self._crossed, self._left
        self.ops, self._copies, self._crossed, self._left = [], {}, [], set()
        try:
            results = self._run(graph, arguments, kept)
            results = [a if r is _NOTHING else r for a, r in zip(arguments, results)] if kept is not None else results
            ops = needed(self.ops, [value.number for value in results])
            self._crossed_inside = self._crossed_by(ops)
            return ops, results
        finally:
            self.ops, self._copies, self._crossed, self._left = around

    def _branches(self, op: Any, taken: Sequence[Value]) -> Sequence[Value]:
        names = ("else_branch", "then_branch")
        of_cases = "branches" in op.node_def.attr
        branches = [f.name for f in op.get_attr("branches")] if of_cases else [op.get_attr(name).name for name in names]
        bodies, results = [], []
        for name in branches:
            arguments = [self._again(value) for value in taken[1:]]
            ops, ends = self._inside(self._graph_of(name), arguments)
            self._crossed += [(None, replace(each, size_bytes=None)) for each in self._crossed_inside]
            chosen = self._value(taken[0].tensor, on_host=True)
            inputs = [(v.number, self._held(v)) for v in (chosen, *arguments)]
            bodies.append(Body(tuple(ops), tuple(inputs), tuple(v.number for v in ends), repeats=False))
            results.append(ends)
        largest = [max(ends, key=self._held) for ends in zip(*results)]
        made = [self._value(v.tensor, on_host=v.on_host, listed=v.listed) for v in largest]
        return self._note(taken, made, [self._held(v) for v in largest], bodies)

    def _loop(self, op: Any, taken: Sequence[Value], used: set[int]) -> Sequence[Value]:
        # What a loop carries is where it runs; what is captured is there already.
        carried = [not v.on_host or v.number not in self._rows or self._passes_on_host(v.tensor.dtype) for v in taken]
        taken = [value if there else self._on_device(value) for value, there in zip(taken, carried)]
        step = self._function(op, "body")
        kept = lasting_variables(used, step, self._function(op, "cond"))
        taken = [v if i in kept else replace(v, on_host=True, listed=None) for i, v in enumerate(taken)]
        ends_of_step = enumerate(step.outputs)
        constant = frozenset(i for i, end in ends_of_step if i not in kept or _origin(end).name == step.inputs[i].name)
        grows = any(value.listed and not value.listed.length for i, value in enumerate(taken) if i in kept)
        steps = self._steps(op, taken, step, constant) if grows else None
        counted = grows
        shapes = [value.tensor.shape for value in taken]
        while True:
            arguments = [
                self._again(v) if i in constant else self._carried(v, shapes[i], steps) for i, v in enumerate(taken)
            ]
            ops, results = self._inside(step, arguments, kept)
            ends = [_common(shape, value.tensor.shape) for shape, value in zip(shapes, results)]
            if [str(shape) for shape in ends] == [str(shape) for shape in shapes]:
                break
            shapes = ends
        crossed = self._crossed_inside
        (goes_on,) = self._inside(self._function(op, "cond"), arguments)[1]
        asked = [*self._crossed_inside, *([] if goes_on.on_host else [Crossing(op.type, False, 1)])]
        if (crossed or asked) and not counted:
            steps = self._steps(op, taken, step, constant)
        for times, each_time in ((steps, crossed), (None if steps is None else steps + 1, asked)):
            for each in each_time:
                size = None if times is None or each.size_bytes is None else times * each.size_bytes
                self._crossed.append((None, replace(each, size_bytes=size)))
        inputs = [(v.number, self._held(v, 0 if i in constant else 1)) for i, v in enumerate(arguments)]
        body = Body(tuple(ops), tuple(inputs), tuple(v.number for v in results), repeats=True, constant=constant)
        made = [
            self._value(
                v.tensor if v.listed else _shaped(self._unknown(v.tensor), shape), on_host=v.on_host, listed=v.listed
            )
            for v, shape in zip(results, shapes)
        ]
        self._note(taken, [v for i, v in enumerate(made) if i not in constant], None, [body])
        return [taken[i] if i in constant else value for i, value in enumerate(made)]

    def _steps(self, op: Any, taken: Sequence[Value], step: Any, constant: frozenset[int]) -> int | None:
        """How often a loop runs, where counters alone tell."""
        by = {i: _increment(step, i, taken) for i in range(len(taken)) if taken[i].known is not None}

        def goes_on_after(steps: int) -> Any:
            counted = {i: taken[i].known + steps * more for i, more in by.items() if more is not None}
            known = [v.known if i in constant else counted.get(i) for i, v in enumerate(taken)]
            arguments = [replace(value, known=k) for value, k in zip(taken, known)]
            return self._inside(self._function(op, "cond"), arguments)[1][0].known

        first, last = 0, 1
        while goes_on_after(last):
            first, last = last, 2 * last
            if last > LARGEST_CONSTANT:
                return None
        while last - first > 1:
            middle = (first + last) // 2
            first, last = (middle, last) if goes_on_after(middle) else (first, middle)
        return last if goes_on_after(first) and goes_on_after(last) is not None else None

    def _carried(self, value: Value, shape: Any, steps: int | None) -> Value:
        """What a step of a loop begins with."""
        listed = value.listed
        if listed is not None:
            listed = replace(listed, length=listed.length or steps)
        return self._again(
            replace(value, tensor=_shaped(self._unknown(value.tensor), shape), known=None, listed=listed)
        )

    def _held(self, value: Value, missing: int = 0) -> int:
        """The bytes of a tensor, or of the elements of a list but so many."""
        if value.listed is None:
            return self._bytes(value)
        if value.on_host:
            return 0
        if value.listed.length is None:
            self._unsized.add(value.number)
            return 0
        return (value.listed.length - missing) * value.listed.element_bytes

    def _note(
        self, taken: Sequence[Value], made: Sequence[Value], sizes: Sequence[int] | None, bodies: Sequence[Body]
    ) -> Sequence[Value]:
        sizes = [self._held(value) for value in made] if sizes is None else sizes
        makes = tuple((value.number, size) for value, size in zip(made, sizes))
        self._note_op(Op(tuple(v.number for v in taken), makes, bodies=tuple(bodies)))
        return made


_ON_LISTS = frozenset(
    "TensorListReserve EmptyTensorList TensorListFromTensor TensorListSplit TensorListSetItem TensorListPushBack "
    "TensorListGetItem TensorListGather TensorListStack TensorListConcat TensorListConcatV2 RaggedTensorToVariant "
    "RaggedTensorFromVariant".split()
)


def _made_by(ops: Iterable[Op]) -> Iterator[tuple[int, int]]:
    """What ops give, and those that they run."""
    for op in ops:
        yield from op.makes
        for body in op.bodies:
            yield from (*body.arguments, *_made_by(body.ops))


def _of_rows(spec: Any, lengths: Sequence[Any] | None, rows: int) -> list[tuple[Any, Any, Any]]:
    """The shape and dtype of each tensor of so many rows, and its elements where those are known: row splits."""
    if isinstance(spec, tf.TensorSpec):
        return [(tf.TensorShape([rows]).concatenate(spec.shape[1:]), spec.dtype, None)]
    if not isinstance(spec, tf.RaggedTensorSpec) or lengths is None:
        raise UnknownSizeError
    splits = []
    for known in lengths:
        some = known[np.linspace(0, len(known) - 1, rows).round().astype(int)]
        splits.append(np.concatenate([[0], np.cumsum(some)]).astype(spec.row_splits_dtype.as_numpy_dtype))
        rows = int(splits[-1][-1])
    flat = tf.TensorShape([rows]).concatenate(spec.shape[spec.ragged_rank + 1 :])
    return [(flat, spec.dtype, None), *((tf.TensorShape([len(s)]), spec.row_splits_dtype, s) for s in splits)]


def _shaped(tensor: Any, shape: Any) -> Any:
    if shape is not None and tensor.shape.is_compatible_with(shape):
        tensor.set_shape(shape)
    return tensor


def _common(a: Any, b: Any) -> Any:
    return (
        a
        if a.rank is None
        else tf.TensorShape(None)
        if b.rank != a.rank
        else tf.TensorShape([x if x == y else None for x, y in zip(a.as_list(), b.as_list())])
    )


def _origin(tensor: Any) -> Any:
    """What a tensor is a copy of."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _increment(step: Any, i: int, taken: Sequence[Value]) -> Any:
    """What each step of a loop adds to a variable; `None` where that is not all it does with it, or differs."""
    end = _origin(step.outputs[i]).op
    if end.type not in ("Add", "AddV2"):
        return None
    one, other = map(_origin, end.inputs)
    if one.name != step.inputs[i].name:
        return None
    places = [k for k, tensor in enumerate(step.inputs) if tensor.name == other.name == _origin(step.outputs[k]).name]
    return taken[places[0]].known if places else tf.get_static_value(other)
