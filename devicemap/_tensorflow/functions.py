"""Options and contexts of tracing, and access to the functions and ops of a graph."""

from __future__ import annotations

import contextlib
import copy
import inspect
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, usable, with_fallback

_callbacks = Private("tensorflow.python.eager.context", "Context.op_callbacks", "context")
_context = Private("tensorflow.python.eager.context", "anonymous_name", "context")
_control_flow = Private(
    "tensorflow.python.ops.control_flow_ops", "XLAControlFlowContext.Enter", "XLAControlFlowContext.Exit"
)
_control_flow_util = Private("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext")
_atomic = Private("tensorflow.python.eager.polymorphic_function.atomic_function", "AtomicFunction.graph")
_operations = Private("tensorflow", "Operation._add_control_input", "Operation._update_input")
_script_ops = Private("tensorflow.python.ops.script_ops", "_py_funcs.get")
_summary = Private("tensorflow.python.ops.summary_ops_v2", "_summary_state.writer")

NO_AUTO_CONTROL_DEPS = {"_disable_acd": True}
"""`tf.function(experimental_attributes=...)`: no automatic control dependencies between the ops of the function.

With them, devices run one after another if two devices have a stateful op (test_no_control_dependencies_are_added). The
argument is public, but its values are not.
"""

NO_AUTO_CONTROL_DEPS_NOINLINE = {**NO_AUTO_CONTROL_DEPS, "_noinline": True}
"""The same for a function whose ops must run although their results are unused. It is not inlined.

Inlining such a function would add a NoOp with control edges across devices.
"""

_ALIVE = "_devicemap_alive"
"""Attribute of a graph: the objects that it keeps alive."""


def keep_alive(used: Any, step: Any = None) -> None:
    """Keep an object as long as the graph being traced, which uses its variables or the Python functions of its ops.

    In eager code, keep the object as long as `step`.
    """
    owner = step if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    setattr(owner, _ALIVE, [*getattr(owner, _ALIVE, []), used])


def call_with_leaves(concrete: Any, specs: Sequence[Any], **options: Any) -> Any:
    """Return a `ConcreteFunction` from leaves to a list of leaves that calls another one. `options`: of its `tf.function`."""

    @tf.function(autograph=False, **options)
    def call(*leaves: Any) -> list[Any]:
        return list(concrete(*leaves))

    return call.get_concrete_function(*specs)


def add_control_outputs(ops: Iterable[Any], results: Sequence[Any]) -> list[Any]:
    """Return the results of the function being traced, which then runs these ops even if its results are unused.

    In a `tf.function`, automatic control dependencies do this for stateful ops. Here, `FuncGraph.control_outputs` does
    (test_ops_that_must_run). In the fallback, results wait for the ops.
    """
    results = run_after(ops, results)
    run_always(tensor.op for tensor in tf.nest.flatten(results, expand_composites=True))
    return results


def run_always(ops: Iterable[Any]) -> None:
    """Run these ops in each call of the function being traced, before later ops of its caller, even if results are unused."""
    graph = tf.compat.v1.get_default_graph()
    if exports_control_outputs() and hasattr(graph, "control_outputs"):
        graph.control_outputs.extend(ops)


def run_after(ops: Iterable[Any], results: Sequence[Any]) -> list[Any]:
    """Return the results, on the current device, after these ops have run.

    Grappler removes Identity. The placer would then move the results of the user's function, which have no device, to the
    first GPU. So use EnsureShape (test_inside_a_function_results_that_wait_for_something_go_to_the_host_at_once).
    """
    with tf.control_dependencies(list(dict.fromkeys(ops))):
        waiting: list[Any] = tf.nest.map_structure(
            lambda tensor: tf.ensure_shape(tensor, tensor.shape), list(results), expand_composites=True
        )
    return waiting


@with_fallback(nothing, _operations)
def add_control_input(op: Any, before: Any) -> None:
    """Add a control dependency of an op of the graph being traced on `before`, which must not depend on the op.

    `tf.control_dependencies` orders new ops only, but the schedule 1F1B orders ops that are already in the graph
    (test_1f1b_begins_backward_before_all_is_forward).
    """
    op._add_control_input(before)


def without_auto_control_deps(concrete: Any, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a function, and its arguments in the graph that is being traced, so that its call waits for no other call.

    Automatic control dependencies run stateful ops without a resource one after another, also across devices. So the function
    gets the handle of a new resource, which is never created, as an additional argument.
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


def temporary_variable(original: Any) -> Any:
    """Return the handle of a new variable like `original`, without a value, on the current device.

    Each execution of the op creates a variable, which is deleted with its handle, so that calls in several threads cannot read
    values of each other (test_a_variable_that_changes_while_threads_read_it). Loading a SavedModel changes the name, and with
    it all calls share the variable of an op, so that each op needs a container (test_a_map_that_reads_a_variable_can_be_saved).
    Eager code needs none, and TensorFlow would keep a kernel for each (test_copies_of_variables_leave_no_memory_behind).
    """
    name = _temporary_name()
    container = "" if name and tf.executing_eagerly() else uuid.uuid4().hex
    return tf.raw_ops.VarHandleOp(
        dtype=original.dtype, shape=original.shape, container=container, shared_name=name or "replica"
    )


@with_fallback(nothing, _context)
def _temporary_name() -> str | None:
    """Return the name of variables that each execution creates. In the fallback, all calls share the variable of an op."""
    return str(_context.anonymous_name())


def exports_control_outputs() -> bool:
    """Whether later ops of the user's function wait for ops of `add_control_outputs`, also if the function is inlined."""
    return usable()


@with_fallback(lambda: False, _control_flow_util)
def in_xla_context() -> bool:
    """Whether XLA compiles the function being traced, or a function around it.

    XLA refuses copies of variables on other devices (test_what_is_compiled_with_all_around_it). The fallback has no copies.
    """
    return bool(_control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def in_vectorized_map() -> bool:
    """Whether `tf.vectorized_map` will convert the ops that are being traced."""
    return "loop_body" in tf.get_current_name_scope().split("/")


def can_list_functions(graph: Any) -> bool:
    """Whether `functions_by_name` finds the functions that a graph calls."""
    return usable(_atomic) and hasattr(graph, "_functions")


def graphs_within(graph: Any) -> list[Any]:
    """Return a graph, and those of the functions that it calls, at any depth."""
    return [graph, *functions_by_name(graph).values()]


def functions_by_name(graph: Any) -> dict[str, Any]:
    """Return the graphs of the functions that a graph calls, at any depth, by the names of the functions.

    `Graph.as_graph_def()` also has the functions, but without the dtypes and shapes of their tensors.
    """
    if not can_list_functions(graph):
        return {}
    graphs = {name: getattr(function, "graph", None) for name, function in graph._functions.items()}
    return {name: each for name, each in graphs.items() if each is not None}  # functions of TensorFlow 1 have none


def reachable(start: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return these nodes of a graph of any kind, those that follow them, and so on, each once."""
    found, pending = dict[Any, None](), [*start]
    while pending:
        node = pending.pop()
        if node not in found:
            found[node] = None
            pending += following(node)
    return [*found]


_own: weakref.WeakSet[Any] = weakref.WeakSet()
"""Graphs that `traced_graphs` found. Later traces in `retracing` with the same key share them."""


def traced_graphs(graph: Any) -> list[Any]:
    """Return a graph, and those of the functions that were traced for it, or for the graph of an earlier call.

    Users may call the other functions that the graph calls, so those must not change.
    """
    called = functions_by_name(graph).values()
    for inner in called:
        outer = inner
        while outer is not None and outer is not graph and outer not in _own:
            outer = getattr(outer, "outer_graph", None)
        if outer is not None:
            _own.add(inner)
    return [graph, *(inner for inner in called if inner in _own)]


@with_fallback(nothing, _context)
def last_set_seed() -> Any:
    """Return an object that identifies the last call of `tf.random.set_seed`.

    Random numbers start again after each call (test_each_seeding_is_another). The public API shows only the seed, by a draw.
    """
    return getattr(_context.context(), "_rng", None)


@with_fallback(lambda: nothing, _summary)
def summary_settings() -> Callable[[], None]:
    """Return a function that copies this thread's writer, step and condition of `tf.summary` to another thread.

    The public API sets them, but returns only the step (test_settings_of_summaries_are_copied_to_another_thread).
    """
    settings = dict(vars(_summary._summary_state))
    return lambda: vars(_summary._summary_state).update(settings)


@cache
def _retracing() -> Callable[[], Any]:
    context: Any = _control_flow.XLAControlFlowContext

    class TracingAgain(context):
        """Adds its identity to the keys of trace caches, and does nothing else."""

        def IsXLAContext(self) -> bool:
            return False

        def RequiresUniqueFunctionRetracing(self) -> bool:
            return True

    return TracingAgain


@with_fallback(nothing, _script_ops)
def python_function(token: str) -> Any:
    """Return the Python function that an op of `tf.py_function` or `tf.numpy_function` calls, by its attribute `token`.

    The fallback is `None`: devicemap then does not notice that a function has changed (test_python_functions).
    """
    function = _script_ops._py_funcs.get(token)
    return inspect.unwrap(getattr(function, "_func", function))


_contexts: dict[Hashable, Any] = {}


@with_fallback(contextlib.nullcontext, _control_flow)
@contextlib.contextmanager
def retracing(key: Hashable) -> Iterator[None]:
    """Return a context in which the `tf.function`s that the graph being traced calls are traced again, once per `key`.

    A trace contains the seeds of its random ops. They are not part of the keys of a `tf.function`'s trace cache, but the
    identity of an XLA context is. In the fallback, functions keep their seeds, which `CompiledMap.keeps_seeds` states.
    """
    # Never removed, because a later context must not get the same id.
    enclosing = _contexts.setdefault(key, _retracing()())
    enclosing.Enter()
    try:
        yield
    finally:
        enclosing.Exit()


@with_fallback(contextlib.nullcontext, _callbacks, _operations)
@contextlib.contextmanager
def pinning_loops() -> Iterator[None]:
    """Return a context in which the loops that are traced run on the device of their function.

    Loop variables are on the device of the op before them. Results of a call have none, so that the placer would put them on
    the first GPU, in each step of the loop (test_loops_beside_calls_stay_on_their_device).
    """
    callbacks = _callbacks.context().op_callbacks  # of this thread
    callbacks.append(_copy_results_of_calls)
    try:
        yield
    finally:
        callbacks.remove(_copy_results_of_calls)


def _copy_results_of_calls(op_type: str, inputs: Any, attributes: Any, outputs: Any, *_: Any, **__: Any) -> Any:
    """Copy the arguments of a new loop that are results of calls. TensorFlow passes each new op.

    The next callback, such as that of `tf.debugging.enable_check_numerics`, gets the returned outputs, also if they are `None`.
    Callers of ops expect a list.
    """
    if op_type in ("While", "StatelessWhile") and outputs and not tf.executing_eagerly():
        loop = outputs[0].op
        for i, tensor in enumerate(loop.inputs):
            if "PartitionedCall" in tensor.op.type and tensor.dtype not in (tf.resource, tf.string):
                loop._update_input(i, tf.identity(tensor))
    return None if outputs is None else list(outputs)


def with_captures(concrete: Any, replaced: Mapping[Any, Any]) -> Any:
    """Return a view of a `ConcreteFunction` with other captures, by `Tensor.ref()` of its own. The view shares the graph.

    The function itself does not change, because other threads call it (test_a_taped_call_while_another_thread_builds_a_graph).
    """
    view = copy.copy(concrete)
    view.set_external_captures([replaced.get(tensor.ref(), tensor) for tensor in concrete.captured_inputs])
    return view
