"""What the mapped calls of one step share: the model, its devices, and its layers as they run on one device."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import pinning_loops
from devicemap._tensorflow.keras import batch_norms_of, layers_of, replacing, tf_variable
from devicemap.errors import failure
from devicemap.training.stateless import CallScope, add_loss, current_scope

_REPLICA_CALLS = "all_reduce", "all_gather", "merge_call"
"""Methods of `tf.distribute.ReplicaContext` that use other devices. Without a strategy they return their arguments."""


class ForwardPass:
    """The calls of a model and its layers, in one step."""

    def __init__(
        self, model: Any, devices: Sequence[str], batch_norm: str, added_losses: str | None, recomputed: Sequence[Any]
    ):
        """`batch_norm`, `added_losses`: as for `parallelize`. `recomputed`: layers that run again for their gradients."""
        self.model, self.devices = model, devices
        self.added_losses, self.recomputed = added_losses, recomputed
        self.synchronizes = batch_norm == "synchronized" and len(devices) > 1
        """Whether batch normalization takes mean and variance of the rows of all devices."""
        self.variables = model.variables
        """The variables of the model."""
        self.calls = 0
        """The number of mapped calls."""
        held: Counter[str] = Counter()
        for variable in map(tf_variable, self.variables):
            held[variable.device] += variable.shape.num_elements() * variable.dtype.size
        self.home = held.most_common(1)[0][0] if held else "/CPU:0"
        """The device with most bytes of variables, on which outputs are gathered."""
        self.layers = [(layer, layer.call) for layer in layers_of(model)]
        """Each layer, and its `call` outside of the contexts that replace it."""

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Return a context in which layers run unmapped, in a `CallScope`."""
        with ExitStack() as replaced:
            replaced.enter_context(pinning_loops())
            for layer, call in self.layers:
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
        with self.plain(), CallScope([(variable, tf_variable(variable).read_value()) for variable in self.variables]):
            return tuple(tf.nest.flatten(self.model(inputs, **phase)))


def _as_one_device(name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a method of a `tf.distribute.ReplicaContext` in a layer, and run it unchanged in other threads."""
    if current_scope() is not None:
        raise failure(
            f"a layer calls {name} of tf.distribute, which does not see the rows of other devices here; compute values of "
            "several rows in compute_loss, or in a train_step of the model"
        )
    return method(*args, **kwargs)
