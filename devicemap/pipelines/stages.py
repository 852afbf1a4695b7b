"""The stages of a pipeline. They are traced like the functions of maps."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.keras import is_seed, is_training, notes_of, replacing, set_note, stored_in
from devicemap.compile.audit import WRITES
from devicemap.compile.graph_builder import depends_on
from devicemap.compile.random import Stream, Streams
from devicemap.compile.trace import Traced, trace
from devicemap.data.rows import count_rows
from devicemap.data.structure import as_nodes, as_objects, freeze
from devicemap.errors import FunctionError, OptionError, function_error
from devicemap.options import Options


@dataclass(frozen=True)
class Passed:
    """Specs of the tensors between two stages: leaves of a nest, then tensors that Keras attached to them, such as masks."""

    nest: Any
    """A nest of `tf.TypeSpec`s `[None, ...]`."""

    notes: dict[tuple[int, str], Any]
    """The `tf.TypeSpec` of each attached tensor, by the index of its leaf and the name of the attribute."""

    def unpacked(self, tensors: Sequence[Any]) -> Any:
        """Return the nest of tensors, with attached tensors."""
        count = len(tf.nest.flatten(self.nest))
        for (i, name), note in zip(self.notes, tensors[count:]):
            set_note(tensors[i], name, note)
        return as_objects(tf.nest.pack_sequence_as(self.nest, list(tensors[:count])))

    def with_targets(self, specs: Any) -> Passed:
        """Return the specs of this argument and a second one."""
        return Passed((self.nest, specs), self.notes)

    def inserted(self, tensors: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        """Return the tensors of `with_targets`, given those of the first argument and of the second one."""
        count = len(tensors) - len(self.notes)
        return [*tensors[:count], *targets, *tensors[count:]]


def notes_by_leaf(leaves: Sequence[Any]) -> dict[tuple[int, str], Any]:
    """Return the tensors that Keras attached to leaves, by the index of the leaf and the name of the attribute."""
    return {(i, name): note for i, leaf in enumerate(leaves) for name, note in notes_of(leaf).items()}


@dataclass(frozen=True)
class TracedStage:
    """A stage, traced for its inputs. It returns the leaves of `passed`, and then a vector `[rows]` for each loss."""

    traced: Traced
    passed: Passed
    losses: tuple[tuple[Any, bool], ...]
    """For each loss, the layer that adds it, and whether it is the sum of its vector. Otherwise, it is the mean."""

    mixes_rows: bool
    """Whether layers write variables other than seeds, as batch normalization does in training."""


class Stage:
    """A function of batches, traced for its inputs."""

    def __init__(self, function: Callable[..., Any], name: str, added_losses: str | None, layers: Sequence[Any]):
        """`name`: the name in errors, such as "stage 0 of 2". `layers`: the `layers_of` the function."""
        self._function, self._name, self._added_losses = function, name, added_losses
        self.layers = layers
        self.variables: list[Any] = []
        """The variables that its traces use, each once."""
        self._known: dict[Any, TracedStage] = {}
        self._streams = Streams()
        for variable in (variable for layer in self.layers[:1] for variable in layer.variables):
            if variable.overwrite_with_gradient:
                raise OptionError(
                    f"{name}: {variable.path} is overwritten with its gradient, as in float8, but microbatches add gradients"
                )

    def state(self) -> tuple[Any, ...]:
        """Return the state on which its traces depend: its variables (`enable_lora` adds some), and which are trainable."""
        variables = ((id(variable), variable.trainable) for layer in self.layers[:1] for variable in layer.variables)
        return *(layer.trainable for layer in self.layers), *variables

    def traced(self, given: Passed, replica: int = 0) -> TracedStage:
        """Return the trace for these inputs in a replica, because the backward pass of a trace belongs to one device.

        Raises:
            FunctionError: the function cannot be traced, or does not return rows.
        """
        key = freeze((given.nest, given.notes)), replica, is_training(), self.state()
        stage = self._known.get(key) or self._trace(given)
        if all(hasattr(tensor, "numpy") for tensor in stage.traced.captures):  # not of a graph that is being built
            self._known[key] = stage
        return stage

    def of_microbatches(self, given: Passed, shares: Sequence[range]) -> list[TracedStage]:
        """Return the trace for each microbatch of a graph. `shares` are the microbatches of each replica.

        With random ops with seeds, or Python functions that a tape follows, each microbatch has a separate trace.
        """
        audit = self.traced(given).traced.audit
        if audit.seeded or audit.python:
            return [self._trace(given, self._streams.next()) for share in shares for _ in share]
        return [stage for r, share in enumerate(shares) if share for stage in [self.traced(given, r)] * len(share)]

    def _trace(self, given: Passed, stream: Stream | None = None) -> TracedStage:
        found: dict[str, Any] = {}

        def run(*arguments: Any) -> Any:
            if given.notes:
                nest = given.unpacked([*tf.nest.flatten(arguments[0]), *arguments[1]])
                arguments = nest if type(nest) is tuple else (nest,)
            return self._with_extras(arguments, self._function(*arguments), added, found)

        function: Any = partial(run)
        with suppress(TypeError, ValueError):
            function.__signature__ = inspect.signature(self._function)  # for error messages
        specs = (given.nest, tuple(given.notes.values())) if given.notes else given.nest
        added: list[Any] = []
        with ExitStack() as replaced:
            for layer in self.layers:
                replaced.enter_context(_recording_losses(layer, added))
            try:
                traced = trace(function, specs, Options(batched=True), stream)
            except FunctionError as error:
                original = error.__cause__ or error
                raise function_error(f"{self._name}: {error}", original) from original
        if "undeclared" in found:
            raise FunctionError(
                f"{self._name}: {found['undeclared']} adds a loss that depends on the rows, by add_loss or an "
                "activity_regularizer, and a stage sees one microbatch; give the Pipeline added_losses='sum' if such losses "
                "are sums over rows, or added_losses='mean' if they are means"
            )
        known = {id(variable) for variable in self.variables}
        self.variables += [variable for variable in traced.concrete.graph.variables if id(variable) not in known]
        nest, notes = traced.nest_of_specs, dict[tuple[int, str], Any]()
        if found["extras"]:
            nest, of_notes, _ = nest
            notes = dict(zip(found["noted"], of_notes))
        handles = {id(stored_in(v).handle) for layer in self.layers for v in layer.variables if not is_seed(v)}
        written = _written(traced)
        return TracedStage(traced, Passed(nest, notes), tuple(found["losses"]), bool(handles & {*map(id, written)}))

    @tf.autograph.experimental.do_not_convert
    def _with_extras(self, arguments: Any, results: Any, added: list[Any], found: dict[str, Any]) -> Any:
        """Return the results of a call, with attached tensors and a vector for each loss, if there are any."""
        leaves, rows = tf.nest.flatten(results), tf.nest.flatten(arguments)
        if self.layers:
            results = as_nodes(results, lists=lambda _: True)
        notes = notes_by_leaf(leaves)
        losses, vectors = [], []
        for layer, loss in added:
            of_rows, count = depends_on(loss, rows), count_rows(rows[0])
            if of_rows and self._added_losses is None:
                found["undeclared"] = layer.name
            is_sum = of_rows and self._added_losses == "sum"
            share = tf.math.divide_no_nan(loss, tf.cast(count, loss.dtype)) if is_sum else loss
            losses.append((layer, is_sum))
            vectors.append(tf.fill([count], share))
        found |= {"noted": [*notes], "losses": losses}
        found["extras"] = bool(notes or added)
        added.clear()
        return (results, tuple(notes.values()), tuple(vectors)) if found["extras"] else results


def _recording_losses(layer: Any, added: list[Any]) -> Any:
    """Return a context in which a layer appends its losses, each as (layer, loss), to a list."""

    def add_loss(loss: Any) -> None:
        added.extend((layer, each) for each in tf.nest.flatten(loss))

    return replacing(layer, add_loss=add_loss)


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
