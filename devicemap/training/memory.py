"""The memory that a training step of a parallelized model takes of each device, from the graph of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.keras import build_for_training
from devicemap.base.devices import list_devices
from devicemap.compile.cost.memory import fits
from devicemap.compile.cost.sketch import Part
from devicemap.compile.cost.walk import full_name
from devicemap.data.rows import any_rows, home_of
from devicemap.errors import OptionError
from devicemap.tell.plan.budget import COPY, SLOT, VARIABLE, memory_of_graph
from devicemap.tell.plan.memory import MARGIN, Memory
from devicemap.training.variables import beside_variables


def memory_of_step(
    model: Any, step: Callable[[Any], Any], inputs: Any, targets: Any, devices: Sequence[str], home: str
) -> tuple[Memory, ...]:
    """What a training step takes of each device. It is traced, and does not run.

    Args:
        model: compiled.
        step: what Keras calls on a batch.
        inputs, targets: nests of `tf.TensorSpec`s, or of tensors, with rows; targets of `None`: like the outputs.
        devices: full names.
        home: the one that outputs go to.

    Raises:
        OptionError: the step cannot be traced for these targets.
    """
    inputs = tf.nest.map_structure(_any_rows, inputs)
    if targets is None:
        targets = model.compute_output_spec(tf.nest.map_structure(_symbolic, inputs))
    batch = inputs, tf.nest.map_structure(_any_rows, targets)
    leaves = tf.nest.flatten(batch)

    @tf.autograph.experimental.do_not_convert
    def on_leaves(*leaves: Any) -> Any:
        return step(tf.nest.pack_sequence_as(batch, leaves))

    try:
        with beside_variables(model):
            build_for_training(model, batch)
        with tf.device(None):
            graph = tf.function(on_leaves, autograph=False).get_concrete_function(*leaves)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise OptionError(
            f"{model.name} cannot be trained on inputs of {inputs} and targets of {batch[1]}; give explain the specs of the "
            f"targets, too: {type(error).__name__}: {error}"
        ) from error
    known = dict.fromkeys((id(v.value.handle) for v in model.optimizer.variables), SLOT)
    known |= dict.fromkeys((id(v.value.handle) for v in model.variables), VARIABLE)
    return memory_of_graph(
        lambda rows: graph, devices, home, leaves, len(devices), lambda captured: known.get(id(captured), COPY)
    )


def step_fits(graph: Any, batch: Any, devices: Sequence[str], home: str) -> bool:
    """Whether a step has enough memory, as far as that is limited and told.

    Args:
        graph: that of the step, a `ConcreteFunction` of a batch.
        batch: a nest of tensors.
        devices: full names.
        home: the one that outputs go to.
    """
    # What `largest_batch` tells is not cut for a few bytes.
    part = 1 - MARGIN / 2
    limits = {d.name: d.memory * part for d in list_devices() if d.name in devices and d.memory is not None}
    leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
    parts = [Part(leaf.shape, leaf.dtype, home=full_name(home_of(leaf))) for leaf in leaves if tf.is_tensor(leaf)]
    return not limits or fits(graph, limits, home, parts) is not False


def _any_rows(leaf: Any) -> Any:
    return any_rows(leaf if isinstance(leaf, tf.TypeSpec) else tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)))


def _symbolic(spec: Any) -> Any:
    import keras

    return keras.KerasTensor(spec.shape, spec.dtype.name)
