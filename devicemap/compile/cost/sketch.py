"""What the ops of a graph allocate for so many rows, told without running any but constants.

A sketch of the graph is built for a number of rows, in which TensorFlow infers the shapes anew; functions are inlined, and
integers that depend on nothing but shapes are computed, as they are when TensorFlow folds constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import functions_within, registered_kernels
from devicemap.base.devices import kind_of
from devicemap.compile.cost.constants import Value, folded, is_view, run_now, zeros
from devicemap.compile.cost.ledger import Crossing, Ledger
from devicemap.compile.cost.lists import on_list
from devicemap.compile.cost.liveness import Body, Op, needed
from devicemap.compile.cost.loops import run_branches, run_loop
from devicemap.compile.cost.optypes import ASSIGNS, BRANCHES, CALLS, HOLDERS, IN_PLACE, LOOPS, ON_LISTS, READS
from devicemap.compile.cost.scratch import scratch_bytes
from devicemap.compile.cost.walk import called_by, full_name, is_placed, needed_in
from devicemap.compile.kernels import are_named, dtypes_of, instead_of_int32, kernel_for
from devicemap.data.shards import shard_sizes

_ALIGNMENT = {"CPU": 64}
"""Allocations are multiples of so many bytes; on all other devices of 256, the smallest that TensorFlow's allocator makes."""

P = ParamSpec("P")
T = TypeVar("T")

NOTHING = Value(0, None)
"""Stands for results of functions that nobody needs."""


def aligned(size: float, kind: str) -> int:
    """What an allocation of so many bytes takes on a kind of device."""
    alignment = _ALIGNMENT.get(kind, 256)
    return math.ceil(size / alignment) * alignment


def unless_unknown(tell: Callable[P, T]) -> Callable[P, T | None]:
    """`tell`, which gives `None` where it fails in any way: whatever a sketch does not know, a figure is not worth a call."""

    @wraps(tell)
    def told(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return tell(*args, **kwargs)
        except Exception:
            return None

    return told


class UnknownSizeError(Exception):
    """The size of something cannot be told before it runs."""


class Sketch:
    """A graph for a number of rows, on a device of a kind: what is not on it is on the host, for all that matters here."""

    def __init__(
        self, source: Any, kind: str, device: str | None = None, default: str | None = None, ahead: bool = False
    ):
        """`source` is a function's graph. Ops run on devices of the `kind`, or, if a `device` is named, those that are placed
        there; where nobody places them, on the `default` one. `ahead`: other devices are as far as they can be."""
        self.source = source
        self.kind = kind
        self.device = device
        self.default = default
        self.ahead = ahead
        self.ops: list[Op] = []
        self.ledger = Ledger()
        self.away: dict[int, str] = {}
        """What is captured and used on the host, by value: its name."""
        self.data: set[int] = set()
        """The values of the data."""
        self.rows: int | None = None
        """How many there are, where ops on int32 of each are looked for."""
        self.int32: dict[str, str] = {}
        """These ops, and a dtype that the device computes each on."""
        self.unsized: set[int] = set()
        """Values whose size cannot be told."""
        self.copies: dict[int, Value] = {}
        """In the device's memory, of values that are not, by their number."""
        self.contents: dict[int, Value] = {}
        """What variables hold now, by the value of their handle."""
        self._products: dict[int, Op] = {}
        """The ops that multiply two tensors that are not constant, by the value that they give, which one op takes."""
        self._count = 0
        self._graph = tf.Graph()
        self._functions = functions_within(source)
        self._scope = ""
        self._after: tuple[int, ...] = ()

    def value(self, tensor: Any, **facts: Any) -> Value:
        """A new value."""
        self._count += 1
        return Value(self._count, tensor, **facts)

    def again(self, value: Value) -> Value:
        """What stands for it in a graph that an op runs."""
        self._count += 1
        if value.number in self.away:
            self.away[self._count] = self.away[value.number]
        return replace(value, number=self._count)

    def tensor(self, part: Part) -> Any:
        """A tensor of the data, with its elements where they are known."""
        return self.unknown(tf.TensorSpec(part.shape, part.dtype)) if part.known is None else self.constant(part.known)

    def arriving(self, part: Part) -> Value:
        """A tensor of the data that a function is given."""
        return self.value(self.tensor(part), on_host=self.passes_on_host(part.dtype), known=part.known)

    def unknown(self, like: Any) -> Any:
        """A tensor of the sketch with the dtype and the shape of another one."""
        with self._graph.as_default():
            return tf.compat.v1.placeholder(like.dtype, like.shape)

    def constant(self, known: Any) -> Any:
        """A tensor of the sketch with these elements."""
        with self._graph.as_default():
            return tf.constant(known)

    def passes_on_host(self, dtype: Any) -> bool:
        """Whether what a function is given and gives is in the host's memory."""
        identity = kernel_for(registered_kernels("Identity"), self.kind, {"T": [dtype.as_datatype_enum]})
        return self.kind != "CPU" and (identity is None or bool(identity.on_host))

    def bytes_of(self, value: Value) -> int:
        """What a tensor takes on the device."""
        shape, dtype = value.tensor.shape, value.tensor.dtype
        if value.on_host or value.lent or dtype == tf.resource or value.listed is not None:
            return 0
        if dtype == tf.string and value.known is not None:  # text of messages
            return self.aligned(sum(map(len, np.ravel(value.known))))
        if dtype in (tf.string, tf.variant) or not shape.is_fully_defined():
            self.unsized.add(value.number)
            return 0
        return self.aligned(int(shape.num_elements()) * int(dtype.size))

    def aligned(self, size: float) -> int:
        """What an allocation of so many bytes takes."""
        return aligned(size, self.kind)

    def held(self, value: Value) -> int:
        """The bytes of a tensor, or of the elements of a list."""
        if value.listed is None:
            return self.bytes_of(value)
        if value.on_host or value.listed.shrinks:
            return 0
        if value.listed.length is None:
            self.unsized.add(value.number)
            return 0
        return value.listed.length * value.listed.element_bytes

    def graph_of(self, name: str) -> Any:
        """The graph of a function that the source calls.

        Raises:
            UnknownSizeError: it is not known.
        """
        if name not in self._functions:  # a gradient was asked for, and TensorFlow calls another one since
            for graph, _ in list(self._functions.values()):
                self._functions |= functions_within(graph)
        graph, _ = self._functions.get(name, (None, False))
        if graph is None:
            raise UnknownSizeError(name)
        return graph

    def run(self, graph: Any, arguments: Sequence[Value], kept: Collection[int] | None = None) -> list[Value]:
        """Run a function's graph, here, for all of its results or for those that are `kept`: gradients add others."""
        ends = [tensor for i, tensor in enumerate(graph.outputs) if kept is None or i in kept]
        values = {tensor.name: value for tensor, value in zip(graph.inputs, arguments)}
        needed, names = needed_in(graph, ends), {tensor.name for tensor in ends}
        waiting = [
            op for op in graph.get_operations() if op in needed and not (op.outputs and op.outputs[0].name in values)
        ]
        awaited = {before for op in waiting for before in op.control_inputs}
        done: dict[Any, tuple[int, ...]] = {}
        left = {*waiting}
        around = self._after
        while waiting:  # once, unless ops were put before others that there were already
            later = []
            for op in waiting:
                if left.intersection(op.control_inputs) or not all(tensor.name in values for tensor in op.inputs):
                    later.append(op)
                    continue
                takers = [(t.name in names, t.consumers()) for t in op.outputs]
                used = {i for i, (ends_here, by) in enumerate(takers) if ends_here or any(t in needed for t in by)}
                self._after = (*around, *(number for before in op.control_inputs for number in done.get(before, ())))
                left.discard(op)
                noted = len(self.ops)
                results = self._of_op(op, [values[tensor.name] for tensor in op.inputs], used)
                alone = len(takers) == 1 and not takers[0][0] and sum(taker in needed for taker in takers[0][1]) == 1
                if op.type == "Mul" and alone and all(values[t.name].maker != "Const" for t in op.inputs):
                    self._products[results[0].number] = self.ops[-1]
                if op in awaited:
                    own = [number for each in self.ops[noted:] for number, _ in each.makes]
                    done[op] = tuple(own) or (*self._after, *(values[tensor.name].number for tensor in op.inputs))
                values |= {tensor.name: value for tensor, value in zip(op.outputs, results)}
            if len(later) == len(waiting):
                raise UnknownSizeError(later[0].name)
            waiting = later
        self._after = around
        return [values.get(tensor.name, NOTHING) for tensor in graph.outputs]

    def inside(
        self, graph: Any, arguments: Sequence[Value], kept: Collection[int] | None = None
    ) -> tuple[list[Op], list[Value], list[Crossing]]:
        """Run a function's graph apart from the ops around it: its ops, its results, and what crosses in it."""
        around = self.ops, self.copies, self.ledger, self._after
        self.ops, self.copies, self.ledger, self._after = [], {}, Ledger(), ()
        try:
            results = self.run(graph, arguments, kept)
            results = [a if r is NOTHING else r for a, r in zip(arguments, results)] if kept is not None else results
            ops = needed(self.ops, [value.number for value in results])
            return ops, results, self.ledger.of(ops)
        finally:
            self.ops, self.copies, self.ledger, self._after = around

    def make(
        self, op: Any, taken: Iterable[Value], made: Sequence[Value], sizes: Sequence[int] | None = None
    ) -> Sequence[Value]:
        """Note what an op allocates."""
        sizes = [self.bytes_of(value) for value in made] if sizes is None else sizes
        takes = tuple(value.number for value in taken)
        views = op.type in HOLDERS and not made[0].on_host
        makes = tuple((value.number, size) for value, size in zip(made, sizes))
        acts = op.op_def.is_stateful and op.type not in READS
        ahead = self.ahead and all(value.on_host for value in made)
        self._note(Op(takes, makes, views, op.type in IN_PLACE, acts, after=self._after, ahead=ahead))
        return made

    def run_bodies(
        self, taken: Sequence[Value], made: Sequence[Value], sizes: Sequence[int] | None, bodies: Sequence[Body]
    ) -> Sequence[Value]:
        """Note what an op allocates that runs graphs."""
        sizes = [self.held(value) for value in made] if sizes is None else sizes
        makes = tuple((value.number, size) for value, size in zip(made, sizes))
        self._note(Op(tuple(v.number for v in taken), makes, bodies=tuple(bodies), after=self._after))
        return made

    def _note(self, op: Op) -> None:
        self.ops.append(op)
        self.ledger.belong_to(op)

    def on_device(self, value: Value) -> Value:
        """A tensor in the device's memory."""
        if not value.on_host or value.listed is not None or value.tensor.dtype in (tf.resource, tf.string, tf.variant):
            return value
        if value.number not in self.copies:
            self.ledger.cross(value, value.maker, to_device=True)
            copy = self.value(value.tensor, known=value.known)
            self.copies[value.number] = copy
            self._note(Op((value.number,), ((copy.number, self.bytes_of(copy)),), ahead=self.ahead))
        return replace(self.copies[value.number], tensor=value.tensor)

    def _of_op(self, op: Any, taken: list[Value], used: set[int]) -> Sequence[Value]:
        """What an op gives; of its outputs some are `used`."""
        if op.type in CALLS | LOOPS | BRANCHES:
            around = self._scope
            self._scope = op.device if is_placed(op.device) else around
            try:
                if op.type in CALLS:
                    return self.run(self.graph_of(op.get_attr("f").name), taken, used)
                return (run_loop if op.type in LOOPS else run_branches)(self, op, taken, used)
            finally:
                self._scope = around
        away = self.is_away(op, taken)
        if op.type == "Identity":
            return [self._passed(op, taken[0], away)]
        if op.type == "Reshape" and taken[0].tensor.shape.rank == op.outputs[0].shape.rank == 0:
            return taken[:1]  # TensorFlow takes it out
        if taken and taken[0].number in self.contents:
            return self._on_variable(op, taken, away)
        if op.type == "ReadVariableOp" and taken[0].home is not None:  # in a loop or a branch
            return self.make(op, taken, [self.value(self._shapes(op, taken)[0], on_host=away, lent=True)])
        known = folded(op, taken) or [None] * len(op.outputs)
        taken_on_host, made_on_host = self._in_host_memory(op)
        name = next((self.away[value.number] for value in taken if value.number in self.away), op.type)
        if name != op.type or away:
            taken_on_host, made_on_host = [True] * len(op.inputs), [True] * len(op.outputs)
        # What is made of constants alone, TensorFlow computes once.
        folds = bool(known) and known[0] is not None
        constant = folds and all(value.constant for value in taken)
        if folds and self.device and op.graph is self.source:  # of shapes that are known where a call is traced
            made = [self.value(self.constant(k), on_host=h, known=k) for k, h in zip(known, made_on_host)]
            return self.make(op, (), made)
        if constant:
            taken_on_host = [value.on_host for value in taken]
        for value, on_host in zip(taken, taken_on_host):
            if on_host:
                self.ledger.leave(value, name)
        taken = [value if on_host else self.on_device(value) for value, on_host in zip(taken, taken_on_host)]
        results = [*map(self.constant, known)] if folds else self._shapes(op, taken)
        if op.type in ON_LISTS or (op.type == "ZerosLike" and taken[0].listed is not None):
            return on_list(self, op, taken, results, made_on_host)
        if is_view(op, taken, results) and not (self.device and away):  # parts that are sent are copied each for itself
            viewed = taken if op.type == "IdentityN" else [taken[-1 if op.type == "Split" else 0]] * len(results)
            return [replace(view, tensor=result, known=k) for view, result, k in zip(viewed, results, known)]
        if all(made_on_host) and all(each is None for each in known) and any(map(self._is_of_rows, results)):
            instead = instead_of_int32(registered_kernels(op.type), self.kind, dtypes_of(op))
            self.int32 |= {} if instead is None else {op.type: instead}
        values = zip(results, made_on_host, known)
        made = [self.value(r, on_host=h, known=k, maker=name, constant=constant) for r, h, k in values]
        sizes = [self.bytes_of(value) for value in (*taken, *made)]
        if scratch := 0 if away else scratch_bytes(op, sizes):
            return self.make(op, taken, [*made, self.value(None)], [*sizes[len(taken) :], scratch])
        if op.type == "Mul" and not away:
            return self._multiplied(op, taken, made)
        return self.make(op, taken, made)

    def _multiplied(self, op: Any, taken: Sequence[Value], made: Sequence[Value]) -> Sequence[Value]:
        """TensorFlow multiplies by a constant first: of `(x * y) * c`, `y * c` as soon as there is `y` (ConstantPushDown)."""
        constants = [value.maker == "Const" and value.tensor.shape.rank == 0 for value in taken]
        product = self._products.pop(taken[constants.index(True) - 1].number, None) if any(constants) else None
        at = [] if product is None else [i for i, each in enumerate(self.ops) if each is product]
        if product is None or not at:  # in another graph
            return self.make(op, taken, made)
        x, y = product.takes
        self.ops[at[0]] = replace(product, takes=(y,))
        takes = (x, *(value.number for value in taken))
        self._note(Op(takes, ((made[0].number, self.bytes_of(made[0])),), in_place=True, after=self._after))
        return made

    def _passed(self, op: Any, value: Value, away: bool) -> Value:
        """What an identity gives: what it takes, unless it brings that from device to device."""
        if self.device is None or value.listed is not None or value.tensor.dtype in (tf.resource, tf.variant):
            return value  # TensorFlow takes it out
        if away and not value.on_host:
            return self._make_away(op, value)
        value = value if away or self.passes_on_host(value.tensor.dtype) else self.on_device(value)
        return self._waiting(value) if self._after else value

    def _waiting(self, value: Value) -> Value:
        """The same value, which is there only when what its op waits for is."""
        later = self.again(value)
        ahead = self.ahead and value.on_host
        self._note(Op((value.number,), ((later.number, 0),), views=True, after=self._after, ahead=ahead))
        return later

    def _make_away(self, op: Any, value: Value) -> Value:
        return self.make(op, [value], [self.value(value.tensor, on_host=True, known=value.known)])[0]

    def is_away(self, op: Any, taken: Sequence[Value]) -> bool:
        """Whether an op runs elsewhere."""
        if self.device is None:
            return kind_of(op.device) == "CPU" != self.kind
        home = next((value.home for value in taken if value.home is not None), None)
        device = op.device if is_placed(op.device) else self._scope
        return (home or (full_name(device) if device else self.default)) != self.device

    def _on_variable(self, op: Any, taken: Sequence[Value], away: bool) -> Sequence[Value]:
        """An op on a variable, which is read without a copy, takes what it is assigned, and else is written over."""
        content = self.contents[taken[0].number]
        if op.type == "ReadVariableOp":
            if not away:
                return [content]
            return self.make(op, (), [self.value(content.tensor, on_host=True)])
        others = [value if away else self.on_device(value) for value in taken[1:]]
        if op.type == "AssignVariableOp":
            made = [self.value(others[0].tensor, on_host=away)]
            self._note(Op((others[0].number,), ((made[0].number, 0),), views=True, acts=True, after=self._after))
            self.contents[taken[0].number] = made[0]
            return []
        if op.type in ASSIGNS:
            made = [self.value(content.tensor, on_host=away)]
            makes = ((made[0].number, self.bytes_of(content)),)
            takes = (content.number, *(value.number for value in others))
            self._note(Op(takes, makes, in_place=True, acts=True, after=self._after))
            self.contents[taken[0].number] = made[0]
            return []
        results = [self.value(result, on_host=away) for result in self._shapes(op, taken)]
        return self.make(op, [content, *others], results)

    def _is_of_rows(self, result: Any) -> bool:
        """Whether an op that is not folded gives something for each row: folded are those on shapes and on constants."""
        return self.rows is not None and (result.shape.num_elements() or 0) >= self.rows

    def _in_host_memory(self, op: Any) -> tuple[list[bool], list[bool]]:
        """Which of the tensors that an op takes and gives are in the host's memory."""
        if self.kind == "CPU":
            return [False] * len(op.inputs), [False] * len(op.outputs)
        kernel = kernel_for(registered_kernels(op.type), self.kind, dtypes_of(op))
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
            made = [self.unknown(output) for output in op.outputs]
        if op.type in ("ResourceGather", "LookupTableFindV2"):  # handles in the sketch do not know what they are of
            indices = taken[1].tensor.shape
            made = [
                self.unknown(tf.TensorSpec(indices.concatenate(op.outputs[0].shape[indices.rank :]), made[0].dtype))
            ]
        if op.type.startswith("Ragged") and not all(tensor.shape.is_fully_defined() for tensor in made):
            given = [v.known if v.known is not None else zeros(v.tensor) for v in taken]
            results = None if any(each is None for each in given) else run_now(op, given)
            made = made if results is None else [self.unknown(result) for result in results]
        if op.type == "SplitV" and taken[1].known is None and (rows := taken[0].tensor.shape[:1]).is_fully_defined():
            sizes = shard_sizes(rows[0], len(made))  # as if even, where speeds of devices decide
            made = [self.unknown(tf.TensorSpec([n, *t.shape[1:]], t.dtype)) for n, t in zip(sizes, op.outputs)]
        for tensor, output in zip(made, op.outputs):
            if tensor.shape.is_compatible_with(output.shape):
                tensor.set_shape(output.shape)
        return list(made)


def own_outputs(concrete: Any) -> set[int]:
    """Which outputs of its graph are its results: behind them come those that its gradients need."""
    return {*range(len(tf.nest.flatten(concrete.structured_outputs, expand_composites=True)))}


@dataclass(frozen=True)
class Part:
    """A tensor of the data, for a number of rows."""

    shape: Any
    dtype: Any
    known: Any = None
    """Its elements, where those are known: of row splits."""

    home: str = ""
    """The device that it lies on, where that matters."""


def parts_of(specs: Sequence[Any], row_lengths: Mapping[int, Sequence[Any]], rows: int) -> list[list[Part]]:
    """The tensors of each leaf of so many rows.

    Raises:
        UnknownSizeError: of sparse data, and of ragged data whose lengths are not known.
    """
    return [_parts(spec, row_lengths.get(i), rows) for i, spec in enumerate(specs)]


def _parts(spec: Any, lengths: Sequence[Any] | None, rows: int) -> list[Part]:
    if isinstance(spec, tf.TensorSpec):
        return [Part(tf.TensorShape([rows]).concatenate(spec.shape[1:]), spec.dtype)]
    if not isinstance(spec, tf.RaggedTensorSpec) or lengths is None:
        raise UnknownSizeError
    splits = []
    for known in lengths:
        some = known[np.linspace(0, len(known) - 1, rows).round().astype(int)]
        splits.append(np.concatenate([[0], np.cumsum(some)]).astype(spec.row_splits_dtype.as_numpy_dtype))
        rows = int(splits[-1][-1])
    flat = tf.TensorShape([rows]).concatenate(spec.shape[spec.ragged_rank + 1 :])
    return [Part(flat, spec.dtype), *(Part(tf.TensorShape([len(s)]), spec.row_splits_dtype, s) for s in splits)]
