"""Everything devicemap uses of TensorFlow that is not public; each entry says why no public name serves.

`tests/test_internals.py` fails the day one of them goes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.eager import cancellation, context, execute, forwardprop_util, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import kernels
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import control_flow_ops, gradients_util, handle_data_util, resource_variable_ops

UNCHAINED = {"_disable_acd": True}
"""`tf.function(experimental_attributes=UNCHAINED)`: no automatic control dependencies between the ops of the function.

They would run one tower after another as soon as two of them hold a stateful op. The attribute's value is not public;
the argument that takes it is. Order inside a tower is kept: each tower is a function of its own.
"""


UNCHAINED_UNIT = {**UNCHAINED, "_noinline": True}
"""The same for a function whose ops must run although nobody uses what they return.

Inlined into a caller, such a function leaves behind one op that all towers have a control edge to, across devices.
"""


def must_run(ops: Iterable[Any]) -> None:
    """Let the function that is being traced run these ops whether or not their results are used.

    Automatic control dependencies do this for stateful ops; a function without them has to say it itself.
    """
    graph = tf.compat.v1.get_default_graph()
    graph.control_outputs.extend(dict.fromkeys(ops))


def differentiate_in_place(ops: Iterable[Any]) -> None:
    """Let the gradients of these ops of the graph being traced be computed on the devices that the ops are placed on.

    TensorFlow adds gradients to a function without a device, which means the first one; the option that would change it
    (`colocate_gradients_with_ops` of `tf.gradients`) does not reach the gradients of functions, and each op's own gradient
    function, the one place left, is not public.
    """
    for op in dict.fromkeys(ops):
        try:
            gradient = framework_ops.get_gradient_function(op)
        except LookupError:  # it has none
            continue
        if op.device and gradient is not None:
            op._gradient_function = _on_device(gradient, op.device)


def _on_device(gradient: Callable[..., Any], device: str) -> Callable[..., Any]:
    def placed(op: Any, *upstream: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        with tf.device(device):
            gradients = gradient(op, *upstream)
            for added in graph.get_operations()[known:]:
                _bring_inputs(added)
        return gradients

    return placed


def _bring_inputs(op: Any) -> None:
    """Let an op take what comes into its graph by way of the device of the moment; variables stay where they are.

    TensorFlow hands lists (of a loop's intermediate results) to a function on the first device, whatever made them; a loop
    then fetches its list from there, and hands it back, in each step.
    """
    for i, tensor in enumerate(op.inputs):
        if tensor.dtype != tf.resource and tensor.op.type == "Placeholder":
            op._update_input(i, tf.identity(tensor))


def differentiate_freely(graph: Any) -> None:
    """Let the gradients of gathers in a function's graph, and in those that it calls, not ask for a device.

    They ask for that of what was gathered from, by name. In the gradients of a function that several towers call it is one
    name, and TensorFlow brings all of it to one device.
    """
    for each in (graph, *(inner for inner, _ in functions_within(graph).values())):
        for op in each.get_operations():
            if op.type in ("Gather", "GatherV2"):
                gradient = framework_ops.get_gradient_function(op)
                if not hasattr(gradient, "without_colocation"):  # a function that fn calls is met again in each trace
                    op._gradient_function = _without_colocation(gradient)


def complete_handle_data(graph: Any) -> None:
    """Tell a function's graph, and those that it calls, what variables the handles are of that their ops hand on.

    A branch of `tf.cond` does not tell (vectorised loops have one in each step), and second gradients of what follows
    need the shape: without it they fail.
    """
    graphs = {name: inner for name, (inner, _) in functions_within(graph).items()}
    more = True
    while more:
        more = False
        for each in (graph, *graphs.values()):
            for op in each.get_operations():
                for i, handle in enumerate(op.outputs):
                    if handle.dtype == tf.resource and not _has_handle_data(handle):
                        source = _handed_on(op, i, graphs)
                        if source is not None and _has_handle_data(source):
                            handle_data_util.copy_handle_data(source, handle)
                            more = True


def _handed_on(op: Any, i: int, graphs: dict[str, Any]) -> Any:
    """The tensor that is output `i` of an op that only hands it on."""
    if op.type in ("Identity", "IdentityN", "While", "StatelessWhile"):
        return op.inputs[i]
    attribute = {"If": "then_branch", "StatelessIf": "then_branch"}.get(op.type, "f")
    calls = op.type in ("If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
    called = graphs.get(op.get_attr(attribute).name) if calls else None
    return None if called is None else called.outputs[i]


def _has_handle_data(handle: Any) -> bool:
    of_what = handle_data_util.get_resource_handle_data(handle).shape_and_type
    return len(of_what) > 0 and not any(each.shape.unknown_rank for each in of_what)


def _without_colocation(gradient: Callable[..., Any]) -> Callable[..., Any]:
    def free(op: Any, *upstream: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        gradients = gradient(op, *upstream)
        for added in graph.get_operations()[known:]:
            if "_class" in added.node_def.attr:
                added._clear_attr("_class")
        return gradients

    free.without_colocation = True  # type: ignore[attr-defined]
    return free


def holding(handle: Any, value: Any) -> Any:
    """The `handle` of a variable that was assigned `value`, linked to it: gradients of the one go to the other.

    An assignment has no gradient. `tf.custom_gradient` would do, but keeps each graph that uses it for good.
    """
    linked, _ = tf.identity_n([handle, value])
    linked.op._gradient_function = lambda op, of_handle, of_value: [None, of_handle]
    return linked


def last_set_seed() -> Any:
    """What stands for the last `tf.random.set_seed`: another object after each. Public API tells only the seed, by drawing."""
    return getattr(context.context(), "_rng", None)


class _Retracing(control_flow_ops.XLAControlFlowContext):
    """What keys the caches of `tf.function`s by its own identity, and does nothing else."""

    def IsXLAContext(self) -> bool:
        return False

    def RequiresUniqueFunctionRetracing(self) -> bool:
        return True


_retracings: list[_Retracing] = []


@contextlib.contextmanager
def retracing() -> Iterator[None]:
    """While it lasts, each `tf.function` that the graph being traced calls is traced once more, and not taken from its cache.

    A trace holds the seeds of its random ops, but the cache is not keyed by them, nor by anything else that is public.
    """
    enclosing = _Retracing()
    _retracings.append(enclosing)  # for good: the key is its id, which no later one may have
    enclosing.Enter()
    try:
        yield
    finally:
        enclosing.Exit()


def tape_is_recording() -> bool:
    """Whether a `tf.GradientTape` or `tf.autodiff.ForwardAccumulator` of this thread may record the next op.

    Public API tells only whether a given tape watches a given tensor, and needs that tape.
    """
    return bool(record.could_possibly_record())


def order_of_gradients(concrete: Any, tensors: Iterable[Any]) -> int:
    """Which gradients a call of a `ConcreteFunction` in eager code has to keep: 0 none, 1 first ones, 2 any.

    TensorFlow runs another function for each; public API does not tell which.
    """
    for variable in concrete.graph.variables:  # as the call would: tapes may start to watch it here
        resource_variable_ops.variable_accessed(variable)
    return int(gradients_util.PossibleTapeGradientTypes([*tensors, *concrete.captured_inputs]))


def have_tangents(tensors: Iterable[Any]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` of this thread follows one of these tensors.

    Public API asks one accumulator, and needs it.
    """
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def optimized_graph(graph_def: Any, outputs: Iterable[str]) -> Any:
    """A `GraphDef` that gives these `outputs`, as TensorFlow would run it on its own, without nested function calls.

    The runtime optimises only what it is about to run, and hands nothing back; TensorFlow's converters use the same entry.
    The process's own optimiser options apply.
    """
    fetched = meta_graph_pb2.CollectionDef()
    fetched.node_list.value.extend(outputs)
    graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    graph.collection_def["train_op"].CopyFrom(fetched)
    config = tf.compat.v1.ConfigProto.FromString(context.context().function_call_options.config_proto_serialized)
    config.graph_options.rewrite_options.min_graph_nodes = -1  # small graphs too
    return tf_optimizer.OptimizeGraph(config, graph)


def squeeze_named_axes(graph: Any) -> bool:
    """Let a function's graph, and those that it calls, say which axes of length 1 they drop; whether all could.

    `tf.squeeze` without an axis drops all, and vectorised, of one row, the row axis too: `tf.vectorized_map` adds that as if
    it were one of many.
    """
    graphs = (graph, *(inner for inner, _ in functions_within(graph).values()))
    squeezes = [op for each in graphs for op in each.get_operations() if op.type == "Squeeze"]
    for op in squeezes:
        if op.get_attr("squeeze_dims"):
            continue
        tensor = op.inputs[0]
        if not tensor.shape.is_fully_defined():
            return False
        axes = [axis for axis, length in enumerate(tensor.shape) if length == 1]
        if axes:
            op._set_attr("squeeze_dims", attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=axes)))
            continue
        for consumer in op.outputs[0].consumers():  # it drops nothing, and has no way to say so
            for i in [i for i, used in enumerate(consumer.inputs) if used is op.outputs[0]]:
                consumer._update_input(i, tensor)
    return True


def functions_within(graph: Any) -> dict[str, tuple[Any, bool]]:
    """The functions that a function's graph calls, at any depth: name -> its graph, and whether XLA compiles it.

    `Graph.as_graph_def()` holds them too, but without the dtypes and shapes of their tensors.
    """
    return {
        name: (function.graph, "_XlaMustCompile" in function.cached_definition.attr)
        for name, function in graph._functions.items()
        if function.graph is not None
    }


def registered_kernels(op: str) -> list[tuple[str, dict[str, frozenset[int]]]]:
    """The kernels that this process has for a type of op: device type, and the dtypes (enums) each attribute may have.

    Placing an op on a device tells too late, and only with that device at hand.
    """
    return [
        (kernel.device_type, {c.name: frozenset(c.allowed_values.list.type) for c in kernel.constraint})
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
    ]


def unrecorded(concrete: Any, optimize: bool = True) -> Callable[..., Any]:
    """What calls a `ConcreteFunction` in eager code when no tape is recording, with tensors only.

    The public call binds its arguments to a Python signature and asks the tapes first, which takes as long as running a
    small graph does. With `optimize=False`, the graph runs as it is. With a cancellation `manager`, a call can be cancelled:
    TensorFlow's own way keeps the manager in a global of the process, where threads meet those of others.
    """
    function, captured = concrete.inference_fn, list(concrete.captured_inputs)
    ctx = context.context()
    attributes = dict(ctx.function_call_options.as_attrs())
    if not optimize:
        config = tf.compat.v1.ConfigProto.FromString(attributes["config_proto"])
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        attributes["config_proto"] = config.SerializeToString()
    fixed = tf.compat.as_str(function.name), len(function.function_type.flat_outputs)
    flat_attributes = tuple(itertools.chain(*attributes.items()))

    def call(*tensors: Any, manager: Any = None) -> Any:
        inputs = [*tensors, *captured]
        with atomic_function.InterpolateRuntimeError(function):  # adds to an error where its op was defined
            if manager is None:
                results = execute.execute(*fixed, inputs, flat_attributes, ctx)
            else:
                results = execute.execute_with_cancellation(*fixed, inputs, flat_attributes, ctx, manager)
        return function.function_type.pack_output(results)

    return call


class Cancellation:
    """Cancels running `ConcreteFunction`s from another thread.

    TensorFlow's runtime can do that; the public API has no name for it since sessions went. Each call gets a manager of
    its own, because a call that fails cancels what else runs under its manager.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._cancelled = False

    def cancellable(self, concrete: Any, optimize: bool = True) -> Callable[..., Any]:
        """As `unrecorded`, but calls end with `tf.errors.CancelledError` at `cancel`, and later ones at once."""
        function = unrecorded(concrete, optimize)

        def call(*tensors: Any) -> Any:
            manager = cancellation.CancellationManager()
            with self._lock:
                self._running.add(manager)
                if self._cancelled:
                    manager.start_cancel()
            try:
                return function(*tensors, manager=manager)
            finally:
                with self._lock:
                    self._running.discard(manager)

        return call

    def cancel(self) -> None:
        """End the calls that run: no further op starts; what a device is computing goes on to its end."""
        with self._lock:
            self._cancelled = True
            running = list(self._running)
        for manager in running:
            manager.start_cancel()
