"""How functions are traced, and what their graphs hold."""

from __future__ import annotations

import contextlib
import copy
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, usable, with_fallback

_context = Private("tensorflow.python.eager.context", "context")
_control_flow = Private(
    "tensorflow.python.ops.control_flow_ops", "XLAControlFlowContext.Enter", "XLAControlFlowContext.Exit"
)
_control_flow_util = Private("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext")
_atomic = Private(
    "tensorflow.python.eager.polymorphic_function.atomic_function",
    *("AtomicFunction.graph", "AtomicFunction.cached_definition"),
)

UNCHAINED = {"_disable_acd": True}
"""`tf.function(experimental_attributes=UNCHAINED)`: no automatic control dependencies between the ops of the function.

They would run one device after another as soon as two of them hold a stateful op. The attribute's value is not public;
the argument that takes it is. Order on a device is kept: each calls a function of its own.
"""


UNCHAINED_UNIT = {**UNCHAINED, "_noinline": True}
"""The same for a function whose ops must run although nobody uses what they return.

Inlined into a caller, such a function leaves behind one op that all devices have a control edge to, across devices.
"""


def must_run(ops: Iterable[Any], results: Sequence[Any]) -> list[Any]:
    """Let the function that is being traced run these ops whether or not its `results` are used: what it is to return.

    Automatic control dependencies do this for stateful ops; a function without them has to say it itself. Publicly, by
    results that wait for the ops; what comes next in a function that it is inlined into does not (`tells_callers`).
    """
    results = waiting_for(ops, results)
    graph = tf.compat.v1.get_default_graph()
    if tells_callers() and hasattr(graph, "control_outputs"):
        graph.control_outputs.extend(tensor.op for tensor in tf.nest.flatten(results, expand_composites=True))
    return results


def waiting_for(ops: Iterable[Any], results: Sequence[Any]) -> list[Any]:
    """The results, on the device of the moment, once these ops have run.

    By an op that does nothing, and is no identity: TensorFlow takes those out, and lets what comes next wait in their place. An
    identity that the user's function returns would, and without a device of its own goes by the first GPU. Waiting for nothing
    but what it returns, it is taken out, too; where there are several, TensorFlow leaves them.
    """
    with tf.control_dependencies(list(dict.fromkeys(ops))):
        waiting: list[Any] = tf.nest.map_structure(
            lambda tensor: tf.ensure_shape(tensor, tensor.shape), list(results), expand_composites=True
        )
    return waiting


def unchained(concrete: Any, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a function, and its arguments in the graph that is being traced, such that its call waits for no other call.

    Automatic control dependencies run stateful ops that take no resource one after another, on whatever device. So the function
    gets one more argument: the handle of a resource that is never created.
    """
    takes_resources = any(tensor.dtype == tf.resource for tensor in concrete.inputs)
    stateful = any(op.op_def.is_stateful for op in concrete.graph.get_operations())
    if takes_resources or not stateful:
        return concrete, list(arguments)

    @tf.function(autograph=False)
    def with_resource(resource: Any, *taken: Any) -> Any:
        return concrete(*taken)

    specs, _ = concrete.structured_input_signature
    own = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=uuid.uuid4().hex)
    return with_resource.get_concrete_function(tf.TensorSpec([], tf.resource), *specs), [own, *arguments]


def tells_callers() -> bool:
    """Whether ops that `must_run` have done so before what comes next to them in the user's function, also when inlined."""
    return usable()


@with_fallback(lambda: False, _control_flow_util)
def compiled_as_a_part() -> bool:
    """Whether XLA will compile the function that is being traced: its own `jit_compile` asks for it, or one's around it.

    Publicly it is taken not to; variables stay in place then, whoever asks.
    """
    return bool(_control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def shows_functions(graph: Any) -> bool:
    """Whether `functions_within` can tell; else it finds none."""
    return usable(_atomic) and hasattr(graph, "_functions")


def functions_within(graph: Any) -> dict[str, tuple[Any, bool]]:
    """The functions that a function's graph calls, at any depth: name -> its graph, and whether XLA compiles it.

    `Graph.as_graph_def()` holds them too, but without the dtypes and shapes of their tensors.
    """
    if not shows_functions(graph):
        return {}
    return {
        name: (function.graph, "_XlaMustCompile" in function.cached_definition.attr)
        for name, function in graph._functions.items()
        if getattr(function, "graph", None) is not None  # what TensorFlow 1 made has none
    }


_own: weakref.WeakSet[Any] = weakref.WeakSet()


def own_functions(graph: Any) -> tuple[list[Any], list[str]]:
    """The graphs of the functions that a function's graph calls: those traced for it, and the names of others.

    What `tracing_again` made is kept in the caches of the `tf.function`s, for the next one that traces with the same key, and
    used by no one else. Others are functions that were traced before, which the user holds.
    """
    own, others = [], []
    for name, (inner, _) in functions_within(graph).items():
        outer = inner
        while outer is not None and outer is not graph and outer not in _own:
            outer = getattr(outer, "outer_graph", None)
        if outer is None:
            others.append(name)
        else:
            _own.add(inner)
            own.append(inner)
    return own, others


@with_fallback(nothing, _context)
def last_set_seed() -> Any:
    """What stands for the last `tf.random.set_seed`: another object after each. Public API tells only the seed, by drawing."""
    return getattr(_context.context(), "_rng", None)


@cache
def _tracing_again() -> Callable[[], Any]:
    context: Any = _control_flow.XLAControlFlowContext

    class TracingAgain(context):
        """What keys the caches of `tf.function`s by its own identity, and does nothing else."""

        def IsXLAContext(self) -> bool:
            return False

        def RequiresUniqueFunctionRetracing(self) -> bool:
            return True

    return TracingAgain


_contexts: dict[Hashable, Any] = {}


def _as_they_are(_: Hashable) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


@with_fallback(_as_they_are, _control_flow)
@contextlib.contextmanager
def tracing_again(key: Hashable) -> Iterator[None]:
    """While it lasts, the `tf.function`s that the graph being traced calls are traced for this `key`, and for no one else.

    A trace holds the seeds of its random ops, but the cache is not keyed by them, nor by anything else that is public.
    Publicly, they keep the seeds they have, which is seen where the numbers are compared.
    """
    # For good: caches are keyed by its id, which no other one may get.
    enclosing = _contexts.setdefault(key, _tracing_again()())
    enclosing.Enter()
    try:
        yield
    finally:
        enclosing.Exit()


def with_captures(concrete: Any, replaced: Mapping[Any, Any]) -> Any:
    """Return a view of a `ConcreteFunction` that captures other tensors, by `Tensor.ref()` of its own; it shares the graph.

    The function itself is not changed, because other threads call it (test_gradients.py, test_a_taped_call_while...).
    """
    view = copy.copy(concrete)
    view.set_external_captures([replaced.get(tensor.ref(), tensor) for tensor in concrete.captured_inputs])
    return view
