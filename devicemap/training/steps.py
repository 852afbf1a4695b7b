"""The steps that Keras's loops make, a batch each, in microbatches where there is not memory enough."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import read_alone
from devicemap._tensorflow.gradients import all_wait_for, can_wait, needed_by
from devicemap._tensorflow.keras import replacing
from devicemap.base.devices import is_out_of_memory
from devicemap.base.structure import freeze
from devicemap.compile.audit import READS
from devicemap.errors import FunctionError, brief, function_error, warn_user
from devicemap.training.variables import home_of

_ADVICE = (
    "A smaller batch_size needs less on each device; accumulate= and recompute= of devicemap.parallelize keep the steps as "
    "they are, devicemap.spread_variables() what the optimizer keeps apart, and a devicemap.Pipeline the layers"
)

_MOST = 64
"""Microbatches that a step is cut into: TensorFlow waits ten seconds for memory in each attempt, and what does not fit then is
not what a microbatch makes."""


class Steps:
    """What Keras's loops call with batches: a step for each.

    One that does not fit by its plan begins in as many microbatches as do, and so do later ones. One that runs out of memory
    all the same is made again, with the same batch, in twice as many; unless it has begun to change variables.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[..., Any],
        updates: Updates,
        microbatches: int,
        places: int | None,
        made: Callable[[int, float], None] | None,
        fits: Callable[[Any, Any], bool] | None,
    ):
        """
        Args:
            step: `(microbatches, batch) -> results`, to be traced unless the model runs eagerly.
            updates: those of the step.
            microbatches: of a device's rows, in the first step.
            places: how many devices share a batch; `None`: it cannot be cut further.
            made: hears of each step, its rows and its seconds, if anybody does.
            fits: `(graph, batch)`: whether there is memory for a step, by its plan; `None`: it is tried.
        """
        self._model, self._step, self._updates, self._places, self._heard = model, step, updates, places, made
        self.microbatches = microbatches
        self._fits = fits
        self._planned = 0
        """The most rows of a step that are known to fit, or not to be told."""
        self._functions: dict[Any, Any] = {}

    def begin(self) -> Steps:
        """Forget what was traced, as the model may be compiled anew; returns itself."""
        self._functions.clear()
        self._planned = 0
        return self

    def __call__(self, batches: Iterable[Any]) -> list[Any]:
        """Make `steps_per_execution` steps; returns the results of each.

        Raises:
            StopIteration: there are no more batches.
            FunctionError: there is no memory for a step.
        """
        specs = getattr(batches, "element_spec", None)  # Keras weights some means by numbers of rows that it is told
        if any(isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(specs)):
            specs = None
        steps = islice(iter(batches), self._model.steps_per_execution)
        results = [self._made(batch, specs) for batch in steps]
        if not results:
            raise StopIteration
        return results

    def _made(self, batch: Any, specs: Any) -> Any:
        known, began = self.microbatches, time.perf_counter()
        try:
            self._begin(batch, specs)
            results = self._tried(batch, specs)
        except BaseException:
            self.microbatches = known
            raise
        if self.microbatches > known:
            warn_user(
                f"the devices lack memory for a step of {self._model.name}: each takes its rows in {self.microbatches} "
                f"microbatches now, one after another, which gives the same. In training, accumulate={self.microbatches} "
                "begins so",
                RuntimeWarning,
            )
        if self._heard is not None:
            self._heard(_rows(batch), time.perf_counter() - began)
        return results

    def _begin(self, batch: Any, specs: Any) -> None:
        """Cut a step that has more rows than any before it into as many microbatches as its plan says are needed."""
        if self._fits is None or _rows(batch) <= self._planned or not self._can_cut(batch):
            return
        self._planned, given, known = _rows(batch), _without_optionals(batch), self.microbatches
        while not self._fits(self._function(specs).get_concrete_function(given), given):
            if not self._can_cut(batch):  # what is short is not what a microbatch takes
                self.microbatches = known
                return
            self.microbatches *= 2

    def _tried(self, batch: Any, specs: Any) -> Any:
        try:
            results = self._function(specs)(_without_optionals(batch))
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
            if self._updates.begun() or not self._can_cut(batch):
                raise self._told(error) from error
            self.microbatches *= 2
            try:
                return self._tried(batch, specs)
            except FunctionError as refused:
                if is_out_of_memory(refused):
                    raise
                raise self._told(error, refused) from refused
        self._updates.made += 1
        return results

    def _function(self, specs: Any) -> Any:
        """What makes a step of a batch, of these specs if they are known."""
        key = self.microbatches, freeze(specs)
        if key not in self._functions:
            step = partial(self._step, self.microbatches)
            signature = None if specs is None else [specs]
            self._functions[key] = (
                step
                if self._model.run_eagerly
                else tf.function(step, signature, autograph=False, reduce_retracing=True)
            )
        return self._functions[key]

    def _can_cut(self, batch: Any) -> bool:
        if self._places is None or self._model.run_eagerly or not can_wait():
            return False
        return self.microbatches < min(_MOST, _rows(batch) / self._places)

    def _told(self, error: Any, refused: FunctionError | None = None) -> FunctionError:
        why = "" if refused is None else f" Microbatches of it cannot run: {refused}"
        return function_error(f"{self._model.name} ran out of memory: {brief(error)}. {_ADVICE}.{why}", error)


class Updates:
    """Tells whether a step that failed has changed variables: in a step, none is changed before all gradients are there."""

    def __init__(self, device: str):
        with tf.init_scope(), tf.device(device):
            self._begun = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.made = 0
        """How many steps have come to their end."""

    def begun(self) -> bool:
        """Whether a step that has not come to its end has begun to change variables; asked once."""
        begun = int(self._begun)
        self.made, made = begun, self.made
        return begun > made

    @contextlib.contextmanager
    def last(self, model: Any, outputs: Sequence[Any]) -> Iterator[None]:
        """While it lasts, a step is traced: what it changes waits for the gradients that the optimizer gets, and without these
        for the `outputs` of the model, which are there at its end. Where these use a variable after the step has changed it,
        nothing waits: such a step has begun as soon as it runs."""
        graph = tf.compat.v1.get_default_graph()
        known, optimizer = len(graph.get_operations()), getattr(model, "optimizer", None)  # none before `compile`
        awaited: dict[str, list[Any]] = defaultdict(list)
        applied: Any = getattr(optimizer, "apply", None)

        def apply(gradients: Any, variables: Any = None) -> Any:
            placed = []
            for gradient, variable in zip(gradients, variables or model.trainable_variables):
                with tf.device(home_of(variable)):  # what hands gradients on is on the host
                    placed.append(None if gradient is None else tf.identity(gradient))
                if gradient is not None:
                    awaited[home_of(variable)] += tf.nest.flatten(placed[-1], expand_composites=True)[:1]
            return applied(placed, variables)

        with replacing(optimizer, apply=apply) if applied else contextlib.nullcontext():
            yield
        changes = [op for op in graph.get_operations()[known:] if _changes(op)]
        if changes:
            there = awaited or ({self._begun.device: [*outputs]} if outputs else {})
            if _change_what_is_used(changes, [tensor.op for tensors in there.values() for tensor in tensors], graph):
                there = {}
            nothing = [_zero_of(*each) for each in there.items()]
            with tf.device(self._begun.device):
                begun = self._begun.assign_add(sum(nothing, tf.constant(1, tf.int64)), read_value=False)
            all_wait_for(changes, begun)


def _zero_of(device: str, tensors: Sequence[Any]) -> Any:
    """A zero that is there when these tensors are, on the device that has them. An op without a result to wait for them would
    be left out."""
    with tf.device(device):
        first = tf.reshape(tf.raw_ops.IdentityN(input=list(tensors))[0], [-1])[:1]
        return tf.reduce_sum(tf.cast((first == first) & (first != first), tf.int64))


def _rows(batch: Any) -> int:
    return int(next(leaf.shape[0] for leaf in tf.nest.flatten(_without_optionals(batch)) if leaf is not None))


def _without_optionals(batch: Any) -> Any:
    """As Keras has it: what stands for no value is none."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


def _changes(op: Any) -> bool:
    """Whether it may change a variable."""
    return op.type not in READS and bool(_variables_of(op))


def _change_what_is_used(changes: Iterable[Any], results: Iterable[Any], graph: Any) -> bool:
    """Whether an op that gives one of these results, or what it is made of, uses a variable after one of these changes: it will
    wait for that, once TensorFlow has traced all of the graph."""
    needed = needed_by(results)
    order = {op: i for i, op in enumerate(graph.get_operations())}
    last_use = {variable: order[op] for op in order if op in needed for variable in _variables_of(op)}
    return any(
        last_use.get(variable, 0) > order[op]
        for op in changes
        for variable in _variables_of(op, read_alone(op) if op.type.endswith("PartitionedCall") else ())
    )


def _variables_of(op: Any, but: Collection[int] = ()) -> list[int]:
    """The handles of variables that an op uses, by identity; but for inputs of these numbers."""
    return [id(tensor) for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource and i not in but]
