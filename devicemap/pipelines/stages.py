"""The stages of a pipeline. They are traced like the functions of maps."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import order_of_gradients
from devicemap._tensorflow.keras import is_seed, is_training, layers_of, notes_of, replacing, set_note, stored_in
from devicemap._tensorflow.keras_graphs import graph_of
from devicemap.compile.audit import WRITES
from devicemap.compile.call_spec import CallSpec, Engine
from devicemap.compile.graph_builder import depends_on
from devicemap.compile.random import Stream, Streams, values_in
from devicemap.compile.replicas import Replicas
from devicemap.compile.trace import Traced, trace
from devicemap.data.rows import count_rows
from devicemap.data.structure import Node, as_objects, freeze, map_nest, nodes_of
from devicemap.errors import FunctionError, OptionError, failure, function_error
from devicemap.options import Options
from devicemap.pipelines.schedule import Setting


class Noted:
    """The kind of the nodes of tensors with others that Keras attached to them, such as masks."""

    @staticmethod
    def __tf_unflatten__(names: tuple[str, ...], parts: Sequence[Any]) -> Any:
        tensor, *notes = parts
        for name, note in zip(names, notes):
            set_note(tensor, name, note)
        return tensor


def noted(nest: Any, lists: bool = False) -> Any:
    """Replace tensors with attached tensors by nodes, for `packed`. `lists`: whether lists are structure."""

    def node_of(leaf: Any, _: str) -> Any:
        notes = notes_of(leaf)
        return Node(Noted, (*notes,), (*range(1 + len(notes)),), (leaf, *notes.values())) if notes else leaf

    return map_nest(node_of, nest, lists=lambda _: lists)


@tf.autograph.experimental.do_not_convert
def packed(nest: Any, leaves: Sequence[Any]) -> Any:
    """Return leaves as a nest of tensors, with the tensors that Keras attached to them."""
    return as_objects(tf.nest.pack_sequence_as(nest, list(leaves)))


@dataclass(frozen=True)
class TracedStage:
    """A stage, traced for its inputs. It returns the leaves of `nest`, and then a vector `[rows]` for each of `losses`."""

    traced: Traced
    nest: Any
    """The specs of its results."""

    losses: tuple[tuple[Any, bool], ...]
    """For each loss, the layer that adds it, and whether it is the sum of its vector. Otherwise, it is the mean.

    The layer is `None` for vectors of the loss of the pipeline.
    """

    mixes_rows: bool
    """Whether layers write variables other than seeds, as batch normalization does in training."""


@dataclass(frozen=True)
class Slot:
    """A stage on its device in a replica of the pipeline."""

    device: str
    share: range
    """The indices of the microbatches of the replica."""

    traces: Sequence[Traced]
    """The trace for each of them. The backward pass of a trace belongs to one device."""

    captures: dict[Any, Any]
    """Replacements of captures of the traces, by `Tensor.ref()` of the latter."""

    assigned: Sequence[Any]
    """Ops for which calls wait."""


class Stage:
    """A function of batches, traced for its inputs."""

    def __init__(self, k: int, function: Callable[..., Any], setting: Setting, loss: Callable[..., Any] | None = None):
        """
        Args:
            k: its index.
            function: the function.
            setting: the options of the pipeline.
            loss: a function of its results and the targets that returns a list of vectors `[rows]`. The stage takes its inputs
                and the tuple of targets.
        """
        self._k, self._function, self._setting, self._loss = k, function, setting, loss
        self._name = f"stage {k} of {setting.stages}{' with the loss' if loss else ''}"
        self.devices = tuple(devices[k % len(devices)] for devices in setting.devices)
        """Its device in each replica. Stages are assigned to the devices in turn."""
        self.is_layer = bool(layers_of(function))
        self.models: list[Any] = [function] if self.is_layer else _layers_in(function)
        """The Keras layer or model of the stage, if it is one; otherwise those to which the function refers."""
        self.layers = [layer for model in self.models for layer in layers_of(model)]
        self.variables: list[Any] = []
        """The variables that its traces use, each once, as those of Keras if they belong to one of the layers."""
        self._known: dict[Any, TracedStage] = {}
        self._streams = Streams()
        for variable in (variable for model in self.models for variable in model.variables):
            if variable.overwrite_with_gradient:
                raise OptionError(
                    f"{self._name}: {variable.path} is overwritten with its gradient, as in float8, but microbatches add "
                    "gradients"
                )

    def with_loss(self, loss: Callable[..., Any]) -> Stage:
        """Return the stage with a loss."""
        return Stage(self._k, self._function, self._setting, loss)

    def state(self) -> tuple[Any, ...]:
        """Return the state on which its traces depend: its variables (`enable_lora` adds some), and which are trainable."""
        variables = ((id(variable), variable.trainable) for model in self.models for variable in model.variables)
        return *(layer.trainable for layer in self.layers), *variables

    def traced(self, given: Any, replica: int = 0) -> TracedStage:
        """Return the trace for a nest of specs in a replica.

        Raises:
            FunctionError: the function cannot be traced, or does not return rows.
        """
        key = freeze(given), replica, is_training(), self.state()
        stage = self._known.get(key) or self._trace(given)
        if all(hasattr(tensor, "numpy") for tensor in stage.traced.captures):  # not of a graph that is being built
            self._known[key] = stage
        return stage

    def slots(self, given: Any, shares: Sequence[range]) -> list[Slot]:
        """Return the stage in each replica, in the graph that is being built.

        With random ops with seeds, or Python functions that a tape follows, each microbatch has a separate trace. The first
        replica has the variables. The other replicas get their values once in each call.
        """
        first = self.traced(given).traced
        separate = first.audit.seeded or first.audit.python
        captures: list[tuple[dict[Any, Any], list[Any]]] = [({}, [])] * len(shares)
        if len(shares) > 1:
            order_of_gradients(first.concrete, [])  # makes tapes watch the variables
            spec = CallSpec.of_shards(len(shares), Engine.INLINE, gradients=1)
            replicas = Replicas(first, self.devices[: len(shares)], spec)
            self._setting.alive.append(replicas)
            values = replicas.values(range(len(shares)))
            for r, device in enumerate(self.devices[: len(shares)]):
                with tf.device(device):
                    captures[r] = replicas.create(r, values)
        slots = []
        for r, (device, share) in enumerate(zip(self.devices, shares)):
            if separate:
                traces = [self._trace(given, self._streams.next()).traced for _ in share]
            else:
                traces = [self.traced(given, r).traced] * len(share)
            slots.append(Slot(device, share, traces, *captures[r]))
        return slots

    def _trace(self, given: Any, stream: Stream | None = None) -> TracedStage:
        added: list[tuple[Any, Any]] = []
        losses: list[tuple[Any, bool]] = []

        has_notes = any(node.kind is Noted for node in nodes_of(given))
        specs = tuple(tf.nest.flatten(given)) if has_notes else given

        def run(*arguments: Any) -> Any:
            added.clear()
            if has_notes:  # a `tf.function` drops attributes of its arguments
                arguments = _as_arguments(packed(given, arguments))
            targets: Any = ()
            if self._loss is not None:
                nest, targets = arguments
                arguments = _as_arguments(nest)
            passed = (list(arguments),) if self._takes_list(len(arguments)) else arguments
            return self._with_losses(self._function(*passed), arguments, targets, added, losses)

        function: Any = partial(run)
        with suppress(TypeError, ValueError):
            if self._loss is None:
                function.__signature__ = inspect.signature(self._function)  # for error messages
        with ExitStack() as replaced:
            replaced.enter_context(_recording)
            for layer in self.layers:
                replaced.enter_context(replacing(layer, add_loss=partial(_record, added, layer)))
            try:
                traced = trace(function, specs, Options(batched=True), stream)
            except FunctionError as error:
                original = error.__cause__ or error
                raise function_error(f"{self._name}: {error}", original) from original
        of_keras = {id(stored_in(variable)): variable for layer in self.layers for variable in layer.variables}
        used = [of_keras.get(id(variable), variable) for variable in traced.concrete.graph.variables]
        known = {id(variable) for variable in self.variables}
        self.variables += [variable for variable in used if id(variable) not in known]
        handles = {id(stored_in(v).handle) for layer in self.layers for v in layer.variables if not is_seed(v)}
        mixes_rows = any(id(handle) in handles for handle in _written(traced))
        nest = traced.nest_of_specs[0] if losses else traced.nest_of_specs
        return TracedStage(traced, nest, tuple(losses), mixes_rows)

    def _takes_list(self, count: int) -> bool:
        """Whether the stage is a functional model of this number of inputs, which takes them as a list."""
        graph = graph_of(self._function) if self.is_layer else None
        return graph is not None and count > 1 and len(graph.inputs) == count

    @tf.autograph.experimental.do_not_convert
    def _with_losses(
        self, results: Any, arguments: Any, targets: Any, added: Any, losses: list[tuple[Any, bool]]
    ) -> Any:
        """Return the results of a call, and vectors of the losses, if there are any. Fill `losses`."""
        vectors = [] if self._loss is None else [*self._loss(results, *targets)]
        losses[:] = [(None, True)] * len(vectors)
        rows, kind = tf.nest.flatten(arguments), self._setting.added_losses
        for layer, loss in added:
            if getattr(loss, "graph", None) not in (None, tf.compat.v1.get_default_graph()):
                raise failure(
                    f"{layer.name} adds a loss in a tf.function, a loop or a branch of the stage, which cannot pass it on; "
                    "call the layer outside of them"
                )
            of_rows, count = depends_on(loss, rows), count_rows(rows[0])
            if of_rows and kind is None:
                raise failure(
                    f"{layer.name} adds a loss that depends on the rows, by add_loss or an activity_regularizer, and a stage "
                    "sees one microbatch; give the Pipeline added_losses='sum' if such losses are sums over rows, or "
                    "added_losses='mean' if they are means"
                )
            is_sum = of_rows and kind == "sum"
            losses.append((layer, is_sum))
            vectors.append(
                tf.fill([count], tf.math.divide_no_nan(loss, tf.cast(count, loss.dtype)) if is_sum else loss)
            )
        results = noted(results, lists=self.is_layer)
        return (results, tuple(vectors)) if vectors else results


_recording = threading.RLock()
"""Held while losses of layers are recorded, because stages in several threads may share layers."""


def _layers_in(function: Any) -> list[Any]:
    """Return the outermost Keras layers to which a function refers: by names, default values, partials and attributes."""
    found: dict[int, Any] = {}
    for value in _values_held_by(function):
        with suppress(Exception):  # proxies run the user's code for any attribute
            held = [*value.values()] if isinstance(value, dict) else value
            for each in held if isinstance(held, list | tuple) else [held]:
                if layers_of(each):
                    found[id(each)] = each
    inner = {id(layer) for model in found.values() for layer in layers_of(model)[1:]}
    return [model for key, model in found.items() if key not in inner]


def _values_held_by(function: Any) -> Iterator[Any]:
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    for each in (function, inspect.unwrap(function)):
        owner = getattr(each, "__self__", each)  # of a method
        yield owner
        yield from getattr(owner, "__dict__", {}).values()
        yield from getattr(each, "__defaults__", None) or ()
        yield from (getattr(each, "__kwdefaults__", None) or {}).values()
    yield from values_in(function)


def _as_arguments(nest: Any) -> tuple[Any, ...]:
    return nest if type(nest) is tuple else (nest,)


def _record(added: list[Any], layer: Any, loss: Any) -> None:
    """Append the losses that a layer adds, each as (layer, loss)."""
    added.extend((layer, each) for each in tf.nest.flatten(loss))


def _written(traced: Traced) -> list[Any]:
    """Return the captured handles that a function writes."""
    pairs = zip(traced.captures, traced.audit.treatments)
    return [handle for handle, treatment in pairs if treatment in WRITES]


def run_in_turn(stages: Sequence[Traced]) -> bool:
    """Whether TensorFlow runs all microbatches of a stage before those of another stage, against the schedule.

    It does so for gradients of Python functions, and if one stage writes a variable that another stage uses.
    """
    users = Counter(id(handle) for stage in stages for handle in stage.captures)
    written = (handle for stage in stages for handle in _written(stage))
    return any(stage.audit.python for stage in stages) or any(users[id(handle)] > 1 for handle in written)
