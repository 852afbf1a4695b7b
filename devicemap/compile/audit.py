"""Audit the graph of a traced function: the state that it captures, and the ops that restrict how it may run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import graphs_within
from devicemap._tensorflow.pfor import LOOPS
from devicemap.compile.graph_walker import BRANCHES, FunctionBody, GraphWalker
from devicemap.compile.source_lines import source_line

READS = frozenset(
    "ReadVariableOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp "
    "LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2".split()
)
"""Ops that do not change the resource."""

_LOOKUPS = frozenset("ResourceGather ResourceGatherNd VariableShape".split())

_ATOMIC = frozenset(
    "AssignAddVariableOp AssignSubVariableOp RngReadAndSkip RngSkip "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt "
    "WriteSummary WriteRawProtoSummary WriteScalarSummary WriteHistogramSummary WriteImageSummary WriteAudioSummary "
    "WriteGraphSummary FlushSummaryWriter".split()
)
"""Updates that lock the resource and give the same result in any order, because summaries have steps. The kernel of
`ResourceScatterAdd` takes a shared lock only, so two of them on one row lose updates (test_treatments)."""

_PYTHON = frozenset("PyFunc PyFuncStateless EagerPyFunc".split())

_VARYING = LOOPS | BRANCHES | _PYTHON | frozenset("For Print PrintV2".split())
"""Ops whose running time depends on values."""

_NO_EFFECTS = frozenset(
    "Assert Case CheckNumerics CheckNumericsV2 DebugIdentityV2 DebugIdentityV3 DeepCopy DeviceIndex Empty "
    "GuaranteeConst If LoadAndRemapMatrix NonDeterministicInts RemoteCall Restore RestoreSlice RestoreV2 "
    "StatefulPartitionedCall StatelessRandomGetAlg Timestamp While".split()
)
"""Ops that TensorFlow registers as stateful, but that change nothing. They check, read, draw numbers or call functions."""


class Treatment(Enum):
    """How several devices may share a captured resource."""

    READ = "read only"
    STAYS = "read only, and not copied, because of the option `in_place`"
    ATOMIC = "updated atomically, in any order"
    SEED = "a seed that each call advances: every device gets its own"
    ORDERED = "written in a way that depends on order: devices run one after another"


WRITES = frozenset((Treatment.ATOMIC, Treatment.SEED, Treatment.ORDERED))
"""Treatments of resources that the function changes."""


@dataclass(frozen=True)
class Audit:
    """The state that a traced function touches."""

    treatments: tuple[Treatment | None, ...]
    """The treatment of each of `captured_inputs`; `None` for a plain tensor."""

    tables: tuple[bool, ...]
    """Whether each of `captured_inputs` is a variable of which the function only looks up rows."""

    random_ops: tuple[str, ...]
    """Types of its stateful random ops."""

    fixed_seeds: frozenset[tuple[int, int]]
    """The seeds of these ops. With them, the function would draw the same numbers on each device and in each graph."""

    effects: tuple[str, ...]
    """Types of its ops that act outside of the graph."""

    custom_gradients: bool = False
    """Whether it holds a `tf.custom_gradient`."""

    custom_gradients_read: bool = False
    """Whether one of these reads a variable, as `tf.recompute_grad` of a layer does. `tf.cond` loses its gradient."""

    loops: bool = False
    """Whether it holds a loop."""

    gradient_needs_variants: bool = False
    """Whether its gradient needs TensorLists of loops or optionals of branches, which XLA does not pass on."""

    gathers_nd: bool = False
    """Whether it calls `tf.gather_nd` of a variable, whose shape TensorFlow then needs. Handles of replicas inside of functions
    lack it (test_same_answer)."""

    python_ops: tuple[str, ...] = ()
    """Types of its ops that call Python functions."""

    pinned: bool = False
    """Whether an op requests a device, as the ops of a map inside of `fn` do."""

    colocated: bool = False
    """Whether an op is colocated with an argument of its function. Copies of the function would share the name of that
    argument."""

    def keeps_state(self, differentiable: bool) -> bool:
        """Whether ops keep state for each trace, so that each call in a graph needs a trace of its own.

        Such ops are random ops with seeds, and Python functions that a tape follows.
        """
        return bool(self.fixed_seeds) or (differentiable and "EagerPyFunc" in self.python_ops)

    @property
    def advances_seed(self) -> bool:
        """Whether it draws from a seed that each call advances."""
        return Treatment.SEED in self.treatments

    @property
    def ordered(self) -> bool:
        """Whether shards must run one after another, in row order."""
        return Treatment.ORDERED in self.treatments

    @property
    def has_side_effects(self) -> bool:
        """Whether it has side effects."""
        return bool(self.effects) or self.writes

    @property
    def writes(self) -> bool:
        """Whether a second run on the same rows would change the user's variables or other resources."""
        return not WRITES.isdisjoint(self.treatments)


def audit(concrete: Any, in_place: Iterable[Any] = ()) -> Audit:
    """Audit a `tf.types.experimental.ConcreteFunction`. Variables `in_place` are not to be copied."""
    graph = GraphWalker(concrete)
    captured = concrete.captured_inputs
    arguments = graph.root.arguments[len(graph.root.arguments) - len(captured) :]
    uses = [
        {*graph.uses(argument)} if tensor.dtype == tf.resource else set()
        for tensor, argument in zip(captured, arguments)
    ]
    staying = {id(variable.handle) for variable in in_place}
    types = graph.op_types()
    bodies = graph.bodies()
    nodes = [node for body in bodies for node in body.nodes.values()]
    random = [node for node in nodes if {"seed", "seed2"} <= {*node.attr}]
    custom_gradients = any("_gradient_op_type" in node.attr for node in nodes)
    return Audit(
        treatments=tuple(
            _treatment(concrete, tensor, ops, staying) if tensor.dtype == tf.resource else None
            for tensor, ops in zip(captured, uses)
        ),
        tables=tuple(bool(ops) and ops <= _LOOKUPS for ops in uses),
        random_ops=tuple(sorted({node.op for node in random})),
        # TensorFlow's random kernels replace the seeds (0, 0) by random ones.
        fixed_seeds=frozenset((node.attr["seed"].i, node.attr["seed2"].i) for node in random) - {(0, 0)},
        effects=tuple(sorted(filter(_has_effects, types))),
        custom_gradients=custom_gradients,
        custom_gradients_read=custom_gradients and bool(read_in_custom_gradients(concrete)),
        loops=bool(types & LOOPS),
        gradient_needs_variants=bool(types & (LOOPS | BRANCHES)),
        gathers_nd="ResourceGatherNd" in types,
        python_ops=tuple(sorted(types & _PYTHON)),
        pinned=any(map(_is_pinned, nodes)),
        colocated=any(map(_is_colocated_with_argument, bodies)),
    )


def read_in_custom_gradients(concrete: Any) -> set[int]:
    """Return the handles of the variables that custom gradients read, by identity: all, if they are in an inner function."""
    handles, found = {tensor.ref(): id(handle) for handle, tensor in concrete.graph.captures}, set[int]()
    for op in (op for graph in graphs_within(concrete.graph) for op in graph.get_operations()):
        if op.type == "IdentityN" and "_gradient_op_type" in op.node_def.attr:
            for each in op.inputs:
                tensor = each.op.inputs[0] if each.op.type == "ReadVariableOp" else each
                if tensor.dtype == tf.resource:
                    found |= {handles[tensor.ref()]} if tensor.ref() in handles else {*handles.values()}
    return found


def is_steady(concrete: Any) -> bool:
    """Return whether the time that a `ConcreteFunction` takes depends on the shapes of its tensors only.

    Loops, branches, Python functions and ops that are not TensorFlow's own may take longer for other values.
    """
    types = op_types(concrete)
    return not types & _VARYING and all(hasattr(tf.raw_ops, op) for op in types)


def op_types(concrete: Any) -> set[str]:
    """Return the types of the ops of a `ConcreteFunction` and of the functions that it calls."""
    return GraphWalker(concrete).op_types()


def variable_of(concrete: Any, handle: Any) -> Any:
    """Return the `tf.Variable` that a captured resource handle belongs to, or `None`."""
    return next((v for v in concrete.graph.variables if v.handle is handle), None)


def writing_line(graph: Any, handle: Any) -> str | None:
    """Return the line of the user's code that writes a captured resource, in a graph or the functions that it calls."""
    inside = (tensor for each in graphs_within(graph) for outside, tensor in each.captures if outside is handle)
    writes = (op for tensor in inside for op in tensor.consumers() if op.type not in READS)
    return next(filter(None, map(source_line, writes)), None)


def _treatment(concrete: Any, handle: Any, ops: set[str], staying: set[int]) -> Treatment:
    if ops <= READS:
        return Treatment.STAYS if id(handle) in staying else Treatment.READ
    if ops <= _ATOMIC:
        return Treatment.ATOMIC
    variable = variable_of(concrete, handle)
    # keras.random.SeedGenerator reads [seed, counter] and assigns [seed, counter + 1]. A user's counter differs only in name.
    if variable is not None and "seed_generator_state" in variable.name and variable.shape.as_list() == [2]:
        return Treatment.SEED
    return Treatment.ORDERED


@cache
def _has_effects(op: str) -> bool:
    """Return whether a type of op acts outside of the graph.

    Ops that take resources do not count, because `Audit.treatments` covers them. Random ops do not count, either.
    """
    definition = tf.Graph().op_def_for_type(op)
    if not definition.is_stateful or op in _NO_EFFECTS or any(attr.name == "seed2" for attr in definition.attr):
        return False
    types = {argument.type for argument in (*definition.input_arg, *definition.output_arg)}
    return types.isdisjoint({tf.resource.as_datatype_enum, tf.variant.as_datatype_enum})


def _is_pinned(node: Any) -> bool:
    """Return whether a node that may read a variable requests a device; `tf.py_function` requests a host only."""
    return bool(tf.DeviceSpec.from_string(node.device).device_type) and not node.op.startswith("TensorList")


def _is_colocated_with_argument(body: FunctionBody) -> bool:
    inside = {node.name for node in body.nodes.values() if node.op != "Placeholder"}
    groups = (group for node in body.nodes.values() if "_class" in node.attr for group in node.attr["_class"].list.s)
    return any(group.decode().removeprefix("loc:@") not in inside for group in groups)
