"""The stages of a pipeline. They are traced like the functions of maps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import retracing
from devicemap._tensorflow.keras import attached_tensors, is_seed, layers_of, tf_variable
from devicemap._tensorflow.keras_calls import graph_of, is_stateless, is_training, recording_keras_use
from devicemap.compile.audit import WRITES, Treatment
from devicemap.compile.graph_walker import depends_on
from devicemap.compile.random import Stream, streams_of_function
from devicemap.compile.trace import Traced, in_fn, trace
from devicemap.data.rows import count_rows
from devicemap.data.structure import Node, as_objects, freeze, map_nest, nodes_of
from devicemap.errors import FunctionError, OptionError, failure, function_error
from devicemap.options import Options
from devicemap.pipelines.schedule import PipelineOptions


class AttachedTensors:
    """The kind of the nodes of tensors with others that Keras attached to them, such as masks."""

    @staticmethod
    def __tf_unflatten__(names: tuple[str, ...], parts: Sequence[Any]) -> Any:
        tensor, *attached = parts
        for name, other in zip(names, attached):
            setattr(tensor, name, other)
        return tensor


def attachments_to_nodes(nest: Any, lists: bool = False) -> Any:
    """Replace tensors with attached tensors by nodes, for `pack`. `lists`: whether lists are structure."""

    def node_of(leaf: Any, _: str) -> Any:
        attached = attached_tensors(leaf)
        if not attached:
            return leaf
        return Node(AttachedTensors, (*attached,), (*range(1 + len(attached)),), (leaf, *attached.values()))

    return map_nest(node_of, nest, lists=lambda _: lists)


@tf.autograph.experimental.do_not_convert
def pack(nest: Any, leaves: Sequence[Any]) -> Any:
    """Return leaves as a nest of tensors, with the tensors that Keras attached to them."""
    return as_objects(tf.nest.pack_sequence_as(nest, list(leaves)))


@dataclass(frozen=True)
class TracedStage:
    """A stage, traced for its inputs. It returns the leaves of `nest`, and then a vector `[rows]` for each of `losses`."""

    name: str
    """Its name in error messages."""

    given: tuple[Any, ...]
    """The specs of its inputs, a nest. If it computes the loss of the pipeline, then also those of the targets."""

    traced: Traced
    nest: Any
    """The specs of its results."""

    losses: tuple[tuple[Any, bool], ...]
    """For each loss, the layer that adds it, and whether it is the sum of its vector. Otherwise, it is the mean.

    The layer is `None` for vectors of the loss of the pipeline.
    """

    mixes_rows: bool
    """Whether it writes variables or tables other than seeds, as batch normalization does in training."""

    @property
    def takes_targets(self) -> bool:
        """Whether it computes the loss of the pipeline."""
        return len(self.given) > 1


class Stage:
    """A function of batches, traced for its inputs."""

    def __init__(self, k: int, function: Callable[..., Any], options: PipelineOptions):
        """`k`: its index. `options`: the options of the pipeline."""
        self._k, self.function, self._options = k, function, options
        self._losses: Any = None
        self._name = f"stage {k} of {options.stages}"
        self.devices = tuple(devices[k % len(devices)] for devices in options.devices)
        """Its device in each replica. Stages are assigned to the devices in turn."""
        self.is_layer = self.knows_layers = bool(layers_of(function))
        self.models: list[Any] = []
        """The Keras layer or model of the stage, if it is one; otherwise the outermost layers that its traces call."""
        self.layers: list[Any] = []
        """All layers in `models`."""
        self.variables: list[Any] = []
        """The variables that its traces use, each once; `keras.Variable`s if they belong to one."""
        self._of_losses: set[int] = set()
        """The identities of the trainable variables that losses use."""
        self._known: dict[Any, TracedStage] = {}
        self._streams = streams_of_function()
        self._add_models([function] if self.is_layer else [])

    def _add_models(self, layers: Sequence[Any]) -> None:
        found = {id(layer): layer for layer in (*self.models, *layers)}
        inner = {id(layer) for model in found.values() for layer in layers_of(model)[1:]}
        self.models = [model for key, model in found.items() if key not in inner]
        self.layers = [layer for model in self.models for layer in layers_of(model)]
        check_layers(self.layers, "other microbatches")

    @property
    def captured(self) -> list[Any]:
        """The variables that its function and the losses use, without those that only its layer uses."""
        return [v for v in self.variables if not self.is_layer or id(tf_variable(v)) in self._of_losses]

    def with_losses(self, losses: Any) -> Stage:
        """Return the stage with these `Losses` of its results. They are computed if it is traced with targets."""
        if losses is self._losses:
            return self
        stage = copy(self)
        stage._losses, stage._known, stage._of_losses = losses, {}, set()
        return stage

    def traced(self, given: tuple[Any, ...], replica: int = 0) -> TracedStage:
        """Return the trace for the specs of the inputs, and perhaps of targets, in a replica."""
        if in_fn.get():  # inside of another stage, which observes the layers, too
            return self._trace(given)
        key = freeze(given), replica
        stage = self._known.get((key, trace_state(self)))
        if stage is None:
            stage = self._trace(given)
            of_a_graph = any(not hasattr(tensor, "numpy") for tensor in stage.traced.captures)
            if not of_a_graph and not is_stateless():  # where layers write no variables
                self._known[key, trace_state(self)] = stage  # of layers that the trace has found, too
        return stage

    def traced_again(self, given: tuple[Any, ...]) -> Traced:
        """Return a trace of its own for the specs of the inputs, with other random numbers."""
        return self._trace(given, next(self._streams)).traced

    def _trace(self, given: tuple[Any, ...], stream: Stream | None = None, builds: bool = True) -> TracedStage:
        """Trace the stage; `builds`: again if the trace has built layers."""
        losses: list[tuple[Any, bool]] = []
        key = object()  # no trace of a `tf.function` has it, so that functions that the stage calls are traced again
        has_targets, has_attached = len(given) > 1, any(node.kind is AttachedTensors for node in nodes_of(given))
        specs = given if has_targets else given[0]
        if has_attached:  # a `tf.function` drops attributes of its arguments
            specs = tuple(tf.nest.flatten(given))
        name = f"{self._name}{' with the loss' if has_targets else ''}"

        def run(*arguments: Any) -> Any:
            used.losses.clear()
            if has_attached:
                arguments = pack(given, arguments)
            nest, *targets = arguments if has_attached or has_targets else (arguments,)
            arguments = nest if type(nest) is tuple else (nest,)
            passed = (list(arguments),) if self._takes_list(len(arguments)) else arguments
            with retracing(key):
                return self._with_losses(self.function(*passed), arguments, targets, used.losses, losses)

        function: Any = partial(run)
        with suppress(TypeError, ValueError):
            if not has_targets:
                function.__signature__ = inspect.signature(self.function)  # for error messages
        with recording_keras_use() as used:
            try:
                traced = trace(function, specs, Options(batched=True), stream)
            except FunctionError as error:
                original = error.__cause__ or error
                source = f", whose data are the results of stage {self._k - 1}" if self._k else ""
                text, _, _ = str(error).partition(". Set batched=False")  # stages have no such option
                said = text.replace("with batched=True fn", "a stage")
                raise function_error(f"{name}{source}: {said}", original) from original
        self.knows_layers = True
        if used.builds and builds:  # while Keras builds layers, it changes the training mode
            return self._trace(given, stream, builds=False)
        if not self.is_layer:
            self._add_models(used.layers)
        of_keras = [*(variable for layer in self.layers for variable in layer.variables), *used.variables]
        by_stored = {id(tf_variable(v)): v for v in (*traced.concrete.graph.variables, *self.variables, *of_keras)}
        known = [*self.variables, *traced.concrete.graph.variables]
        self.variables = [by_stored[key] for key in dict.fromkeys(id(tf_variable(v)) for v in known)]
        by_handle = {id(tf_variable(variable).handle): variable for variable in of_keras}
        states = zip(traced.captures, traced.audit.treatments)
        writes = [(by_handle.get(id(handle)), kind) for handle, kind in states if kind in WRITES]
        mixes_rows = any(kind is not Treatment.SEED and (v is None or not is_seed(v)) for v, kind in writes)
        nest = traced.nest_of_specs[0] if losses else traced.nest_of_specs
        parts = self._options.microbatches * len(self._options.devices)
        in_parts = parts > 1 and (self._options.local or not mixes_rows)
        if has_targets and in_parts and all(v is not None for v, _ in writes):  # the check would change other variables
            self._losses.check_rows(nest, given[1])
        return TracedStage(name, given, traced, nest, tuple(losses), mixes_rows)

    def _takes_list(self, count: int) -> bool:
        """Whether the stage is a functional model of this number of inputs, which takes them as a list."""
        graph = graph_of(self.function) if self.is_layer else None
        return graph is not None and count > 1 and len(graph.inputs) == count

    @tf.autograph.experimental.do_not_convert
    def _with_losses(
        self, results: Any, arguments: Any, targets: Any, added: Any, losses: list[tuple[Any, bool]]
    ) -> Any:
        """Return the results of a call, and vectors of the losses, if there are any. Fill `losses`."""
        vectors: list[Any] = []
        if targets:
            with tf.GradientTape() as tape:
                vectors = self._losses.by_row(results, *targets)
            self._of_losses.update(map(id, tape.watched_variables()))
        losses[:] = [(None, True)] * len(vectors)
        rows, kind = tf.nest.flatten(arguments), self._options.added_losses
        for layer, loss in added:
            if self.is_layer and layer not in self.layers:  # as in Keras, which does not know it
                continue
            if getattr(loss, "graph", None) not in (None, tf.compat.v1.get_default_graph()):
                raise failure(
                    f"{layer.name} adds a loss in a tf.function, a loop or a branch of the stage, which cannot pass it on; "
                    "call the layer outside of them"
                )
            of_rows, count = depends_on(loss, rows), count_rows(rows[0])
            check_added_loss(layer, of_rows, kind, "a stage sees one microbatch; give the Pipeline")
            is_sum = of_rows and kind == "sum"
            losses.append((layer, is_sum))
            vectors.append(
                tf.fill([count], tf.math.divide_no_nan(loss, tf.cast(count, loss.dtype)) if is_sum else loss)
            )
        results = attachments_to_nodes(results, lists=self.is_layer)
        return (results, tuple(vectors)) if vectors else results


def check_layers(layers: Sequence[Any], others: str) -> None:
    """Raise `OptionError` for a layer that has to see all rows. `others`: what sees other rows."""
    for layer in layers:
        if getattr(layer, "stateful", False):
            raise OptionError(
                f"{layer.name} is stateful: it keeps a state for each row of a batch, which {others} would not see; give it "
                "the state as an input and an output"
            )
        if path := next((v.path for v in layer.variables if v.overwrite_with_gradient), None):
            raise OptionError(
                f"{path} is overwritten with its gradient, as in float8, but gradients of {others} are added; use another dtype"
            )


def check_added_loss(layer: Any, of_rows: bool, kind: str | None, advice: str) -> None:
    """Raise an error for a loss that depends on the rows, unless `added_losses` is given as its `kind`."""
    if of_rows and kind is None:
        raise failure(
            f"{layer.name} adds a loss that depends on the rows, by add_loss or an activity_regularizer, and {advice} "
            "added_losses='sum' if such losses are sums over rows, or added_losses='mean' if they are means"
        )


def written_by(traced: Traced) -> list[Any]:
    """Return the captured handles that a function writes."""
    pairs = zip(traced.captures, traced.audit.treatments)
    return [handle for handle, treatment in pairs if treatment in WRITES]


def trace_state(*stages: Stage) -> tuple[Any, ...]:
    """Return the state on which traces depend: training, variables (`enable_lora` adds some), and what is trainable."""
    models = {id(model): model for stage in stages for model in stage.models}.values()
    variables = [v for group in (*models, *stages) for v in group.variables]
    trainable = {
        id(each): each.trainable for each in (*(layer for stage in stages for layer in stage.layers), *variables)
    }
    return (is_training() if models else None, *trainable.items())


def trace_stages(stages: Sequence[Stage], nest: Any, targets: tuple[Any, ...] = ()) -> list[TracedStage]:
    """Trace each stage for the results of the stage before it; the first one for a nest of specs, the last one with targets."""
    traced = list[TracedStage]()
    for stage in stages:
        traced.append(stage.traced((nest, *targets) if stage is stages[-1] else (nest,)))
        nest = traced[-1].nest
    return traced
