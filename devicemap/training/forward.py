"""Map the calls of a Keras model and its layers in a step, with the outputs, losses and new values of one device."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import have_tangents
from devicemap._tensorflow.keras import batch_norms_of, is_stateless, layers_of, replacing, stored_in
from devicemap.devices import choose_devices
from devicemap.errors import DataError, failure
from devicemap.training.mapped_call import MappedCall
from devicemap.training.row_losses import RowLosses
from devicemap.training.stateless import CallScope, Given, add_loss, current_scope

_REPLICA_CALLS = "all_reduce", "all_gather", "merge_call"
"""Methods of `tf.distribute.ReplicaContext` that use other devices. Without a strategy they return their arguments."""


class ForwardPass:
    """The calls of a model and its layers, in one step."""

    def __init__(self, model: Any, devices: Any, batch_norm: str, added_losses: str | None, recomputed: Sequence[Any]):
        """
        Args:
            devices, batch_norm, added_losses: as for `parallelize`.
            recomputed: layers that run again for their gradients.

        Raises:
            OptionError: for devices that do not exist.
        """
        self.model, self.devices = model, choose_devices(devices)
        self.batch_norm, self.added_losses, self.recomputed = batch_norm, added_losses, recomputed
        self.variables = model.variables
        """The variables of the model."""
        self.averaged = {id(v) for layer in batch_norms_of(model) for v in layer.non_trainable_variables}
        """Moving averages of batch normalization, by identity."""
        self.calls = 0
        """The number of mapped calls."""
        held: Counter[str] = Counter()
        for variable in map(stored_in, self.variables):
            held[variable.device] += variable.shape.num_elements() * variable.dtype.size
        self.home = held.most_common(1)[0][0] if held else "/CPU:0"
        """The device with most bytes of variables, on which outputs are gathered."""
        self._layers = [(layer, layer.call) for layer in layers_of(model)]
        """Each layer, and its `call` outside of the contexts that replace it."""

    @contextmanager
    def mapping(
        self, rows: int | None, microbatches: int, losses: bool, row_losses: RowLosses | None = None
    ) -> Iterator[None]:
        """Map the outermost calls of the model and of its layers in this context.

        Args:
            rows: the number of rows of the batch, `None` if it is unknown.
            microbatches: number of parts in which each device runs its rows, in the first call of the model.
            losses: whether losses that layers add are collected.
            row_losses: losses of the call of the model. The step must call the model once.
        """

        def mapped(layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
            """Run a call of a layer with a shard of rows on each device. A call without rows runs unmapped."""
            given = Given.of(args, kwargs, losses)
            if not given.has_rows(rows) or not layer.built or is_stateless():
                return call(*args, **kwargs)
            self._check_no_tangents(layer, given)
            of_model = layer is self.model
            parts = microbatches if of_model and not self.calls else 1  # microbatches have no gradients to their inputs
            self.calls += 1
            with self.plain():
                mapped_call = MappedCall(self, layer, given, parts, row_losses if of_model else None)
                results = mapped_call.run()
            return mapped_call.collected(results)

        with ExitStack() as replaced:
            for layer, _ in self._layers:
                replaced.enter_context(replacing(layer, call=partial(mapped, layer, layer.call)))
            if row_losses is not None:
                replaced.enter_context(row_losses.used())
            yield

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Return a context in which layers run unmapped, in a `CallScope`."""
        with ExitStack() as replaced:
            for layer, call in self._layers:
                replaced.enter_context(replacing(layer, call=call, add_loss=partial(add_loss, layer)))
            for norm in batch_norms_of(self.model):  # `batch_norm` replaces Keras's own synchronization
                replaced.enter_context(replacing(norm, synchronized=False))
            replica = tf.distribute.get_replica_context()
            if replica is not None:  # it is None in the scope of a strategy
                own = {name: partial(_as_one_device, name, getattr(replica, name)) for name in _REPLICA_CALLS}
                replaced.enter_context(replacing(replica, **own))
            yield

    @tf.autograph.experimental.do_not_convert
    def outputs_in_training(self, inputs: Any) -> tuple[Any, ...]:
        """Return the outputs of the model in a training step on one device, in the graph that is being traced."""
        phase = {"training": True} if "training" in inspect.signature(self.model.call).parameters else {}
        with self.plain(), CallScope([(variable, stored_in(variable).read_value()) for variable in self.variables]):
            return tuple(tf.nest.flatten(self.model(inputs, **phase)))

    def _check_no_tangents(self, layer: Any, given: Given) -> None:
        handles = [stored_in(variable).handle for variable in self.variables]
        if have_tangents([*tf.nest.flatten(given.rows, True), *handles]):
            raise DataError(
                f"a tf.autodiff.ForwardAccumulator follows what {layer.name} takes, and gathering rows has no forward mode; "
                "use a tf.GradientTape"
            )


def _as_one_device(name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a method of a `tf.distribute.ReplicaContext` in a layer, and run it unchanged in other threads."""
    if current_scope() is not None:
        raise failure(
            f"a layer calls {name} of tf.distribute, which does not see the rows of other devices here; compute values of "
            "several rows in compute_loss, or in a train_step of the model"
        )
    return method(*args, **kwargs)
