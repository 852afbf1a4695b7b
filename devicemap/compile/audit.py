"""What a traced function does with the state it captures, read from its graph.

Only protocol buffers are looked at: `Graph.as_graph_def()` holds every nested function too. A function reaches its
captures as extra inputs, and hands them on to inner functions, loops and branches by position.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import tensorflow as tf

READS = frozenset(
    "ReadVariableOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp "
    "LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2".split()
)
"""Ops that leave the resource as it is."""

ATOMIC = frozenset(
    "AssignAddVariableOp AssignSubVariableOp RngReadAndSkip RngSkip "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt "
    "WriteSummary WriteRawProtoSummary WriteScalarSummary WriteHistogramSummary WriteImageSummary WriteAudioSummary "
    "WriteGraphSummary FlushSummaryWriter".split()
)
"""Updates that lock the resource and give the same end in any order; summaries have steps. `ResourceScatterAdd` is not one:
for numbers it takes the shared lock only, and two of them on one row lose updates."""

_PYTHON = frozenset("PyFunc PyFuncStateless EagerPyFunc".split())

EFFECTS = frozenset("Print PrintV2 PyFunc EagerPyFunc".split())
"""Ops that act outside of the graph (`PyFuncStateless` says that it does not)."""

_CUTS = frozenset(
    "Round Rint Floor Ceil FloorDiv Cast StopGradient ZerosLike OnesLike OneHot ArgMax ArgMin Equal NotEqual Less LessEqual "
    "Greater GreaterEqual Sign IsFinite IsNan IsInf Where Bucketize".split()
)
"""Ops through which there is no gradient, from numbers with a fraction to others or back."""

LOOPS = frozenset("While StatelessWhile".split())

_VARYING = LOOPS | EFFECTS | frozenset("If StatelessIf Case StatelessCase For PyFuncStateless".split())
"""Ops that take as long as the data says."""

_ALIASES = frozenset("Identity IdentityN".split())


class Treatment(Enum):
    """How several devices may share a captured resource."""

    READ = "read only"
    STAYS = "read only, and where it is, as the option `in_place` says"
    ATOMIC = "updated atomically, in any order"
    SEED = "a seed that each call advances: every device gets its own"
    ORDERED = "written in a way that depends on order: devices run one after another"


@dataclass(frozen=True)
class Audit:
    """The state that a traced function touches."""

    treatments: tuple[Treatment | None, ...]
    """For each of `captured_inputs`; `None` for a plain tensor."""

    random_ops: tuple[str, ...]
    """Types of its stateful random ops."""

    seeds: frozenset[tuple[int, int]]
    """The fixed seeds among theirs: on each device, and in each graph, the function would draw the same numbers."""

    effects: tuple[str, ...]
    """Types of its ops that act outside of the graph."""

    custom_gradients: bool = False
    """Whether it holds a `tf.custom_gradient`."""

    loops: bool = False
    """Whether it holds a loop."""

    reads_again: bool = False
    """Whether it reads a variable more than once."""

    cuts_gradients: bool = False
    """Whether there may be no gradient from a result to what it was made of."""

    python: bool = False
    """Whether it calls Python functions."""

    pinned: bool = False
    """Whether an op asks for a device of its own, as those of a map inside of `fn` do."""

    colocated: bool = False
    """Whether an op asks, by name, for the device of one of its function's inputs: in copies of the function, that is one
    name for the inputs of all."""

    @property
    def seeded(self) -> bool:
        """Whether it draws from fixed seeds."""
        return bool(self.seeds)

    @property
    def advances_seed(self) -> bool:
        """Whether it draws from a seed that each call advances."""
        return Treatment.SEED in self.treatments

    @property
    def ordered(self) -> bool:
        """Whether shards must run one after another, in row order."""
        return Treatment.ORDERED in self.treatments

    @property
    def writes(self) -> bool:
        """Whether running it a second time on the same rows would change what the user keeps."""
        return any(t not in (None, Treatment.READ, Treatment.STAYS) for t in self.treatments)


def audit(concrete: Any, in_place: Iterable[Any] = ()) -> Audit:
    """Audit a `tf.types.experimental.ConcreteFunction`.

    `in_place` are variables that are not to be copied.
    """
    graph_def = concrete.graph.as_graph_def()
    staying = [variable.handle for variable in in_place]
    walk = _Walk({f.signature.name: f for f in graph_def.library.function})
    walk.nodes(graph_def.node, {t.op.name: t.op.name for t in concrete.inputs})
    captured = concrete.captured_inputs
    placeholders = concrete.inputs[len(concrete.inputs) - len(captured) :]
    treatments = []
    for outside, inside in zip(captured, placeholders):
        is_resource = outside.dtype == tf.resource
        treatment = _treatment(concrete, outside, walk.uses[inside.op.name]) if is_resource else None
        if treatment is Treatment.READ and any(outside is handle for handle in staying):
            treatment = Treatment.STAYS
        treatments.append(treatment)
    every_op = {*walk.types}
    return Audit(
        tuple(treatments),
        tuple(sorted(walk.random)),
        frozenset(walk.seeds),
        tuple(sorted(every_op & EFFECTS)),
        walk.custom_gradients,
        bool(every_op & LOOPS),
        any(inside.dtype == tf.resource and walk.reads[inside.op.name] > 1 for inside in placeholders),
        bool(every_op & _CUTS),
        bool(every_op & _PYTHON),
        walk.pinned,
        walk.colocated,
    )


def is_steady(concrete: Any) -> bool:
    """Whether a `ConcreteFunction` takes as long as before wherever its tensors have the same shapes.

    Not where there is a loop, a branch, Python, or an op that is not TensorFlow's own.
    """
    functions = {f.signature.name for f in concrete.graph.as_graph_def().library.function}
    types = op_types(concrete)
    return not types & _VARYING and all(hasattr(tf.raw_ops, op) for op in types - functions)


def op_types(concrete: Any) -> set[str]:
    """Return the types of the ops of a `ConcreteFunction` and of the functions that it calls."""
    graph_def = concrete.graph.as_graph_def()
    return {node.op for nodes in (graph_def.node, *(f.node_def for f in graph_def.library.function)) for node in nodes}


def variable_of(concrete: Any, handle: Any) -> Any:
    """The `tf.Variable` that a captured resource handle belongs to, or `None`."""
    return next((v for v in concrete.graph.variables if v.handle is handle), None)


def _treatment(concrete: Any, handle: Any, ops: set[str]) -> Treatment:
    if ops <= READS:
        return Treatment.READ
    if ops <= ATOMIC:
        return Treatment.ATOMIC
    variable = variable_of(concrete, handle)
    # keras.random.SeedGenerator: reads [seed, counter], assigns [seed, counter + 1]. Nothing but its name tells it
    # from a counter of the user's.
    if variable is not None and "seed_generator_state" in variable.name and variable.shape.as_list() == [2]:
        return Treatment.SEED
    return Treatment.ORDERED


@dataclass
class _Walk:
    """Walks nodes and the functions they call, following resources through their inputs."""

    library: dict[str, Any]
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    reads: Counter[str] = field(default_factory=Counter)
    types: set[str] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    seeds: set[tuple[int, int]] = field(default_factory=set)
    custom_gradients: bool = False
    pinned: bool = False
    colocated: bool = False

    def nodes(self, nodes: Any, names: dict[str, str], results: Iterable[str] = (), used: bool = True) -> None:
        """Visit `nodes`; `names` maps the tensors known to be a resource (or input) to their outermost name.

        `results` are the function's, and `used` says whether anything is made of them: `tf.vectorized_map` leaves the call
        that it has vectorised in the graph.
        """
        names = dict(names)
        taken = (name for node in nodes for name in node.input)
        consumed = {name.partition(":")[0] for name in (*taken, *results)}
        inside = {node.name for node in nodes if node.op != "Placeholder"}
        for node in nodes:
            self.types.add(node.op)
            # A list reads no variable; a py_function asks for its host, and for no device.
            names_device = bool(tf.DeviceSpec.from_string(node.device).device_type)
            self.pinned |= names_device and not node.op.startswith("TensorList")
            self.colocated |= any(group.decode().removeprefix("loc:@") not in inside for group in _groups(node))
            self.custom_gradients |= "_gradient_op_type" in node.attr  # gradient_override_map has it on any op
            if {"seed", "seed2"} <= {*node.attr}:  # a number stream of its own
                self.random.add(node.op)
                seeds = node.attr["seed"].i, node.attr["seed2"].i
                self.seeds |= {seeds} - {(0, 0)}  # where TensorFlow chooses some, each time others
            inputs = [names.get(_tensor(name)) for name in node.input if not name.startswith("^")]
            if node.op in _ALIASES:
                for i, name in enumerate(inputs):
                    if name is not None:
                        names[f"{node.name}:{i}"] = name
                        if i == 0:
                            names[node.name] = name
                continue
            # TensorFlow 1 calls a function by the type of an op
            called = [f for f in (node.op, *_functions(node)) if f in self.library]
            for function in called:
                # branches get the inputs after the predicate, everything else gets all of them
                passed = inputs[1:] if node.op in ("If", "StatelessIf", "Case", "StatelessCase") else inputs
                definition = self.library[function]
                arguments = [argument.name for argument in definition.signature.input_arg]
                inner = {a: n for a, n in zip(arguments, passed) if n is not None}
                self.nodes(definition.node_def, inner, definition.ret.values(), used and node.name in consumed)
            if not called:
                for name in inputs:
                    if name is not None:
                        self.uses[name].add(node.op)
                        self.reads[name] += used


def _groups(node: Any) -> Iterable[bytes]:
    """What it is colocated with."""
    return node.attr["_class"].list.s if "_class" in node.attr else ()


def _tensor(name: str) -> str:
    """`node`, `node:1` in a graph, and `argument`, `node:output:1` in a function, as `node` or `node:1`."""
    node, _, rest = name.partition(":")
    index = rest.rpartition(":")[2]
    return node if index in ("", "0") else f"{node}:{index}"


def _functions(node: Any) -> list[str]:
    found = []
    for value in node.attr.values():
        if value.HasField("func"):
            found.append(value.func.name)
        found.extend(f.name for f in value.list.func)
    return found
