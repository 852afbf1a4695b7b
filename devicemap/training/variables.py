"""Placement of variables: each variable on the device that holds the fewest bytes of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.keras import optimizers_of, replacing, replacing_gradient_sum, tf_variable
from devicemap._tensorflow.runtime import home_of_inputs
from devicemap.devices import choose_devices


@contextlib.contextmanager
def spread_variables(devices: Any = None) -> Iterator[None]:
    """Create each variable in this context on the device that holds the fewest bytes of variables.

    If a model that is created in the context is parallelized, each device needs only a part of the memory of gradients and
    optimizer. Gradients of a variable are added on its device, where its slots are kept and updated (ZeRO, stages 1 and 2;
    Rajbhandari et al., 2020). Each device gets the value once per step. Files do not change.

    Args:
        devices: as for `parallel_map`.

    Raises:
        OptionError: for devices that do not exist.

    Examples:
        >>> with spread_variables(["CPU:0", "CPU:1"]):
        ...     a, b = tf.Variable(tf.zeros([4])), tf.Variable(tf.zeros([4]))
        >>> a.device == b.device
        False
    """
    held = dict.fromkeys(choose_devices(devices), 0)

    def create(next_creator: Any, **options: Any) -> Any:
        device = min(held, key=lambda name: held[name])
        with tf.device(device):
            variable = next_creator(**options)
        held[device] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable

    with tf.variable_creator_scope(create):
        yield


@contextlib.contextmanager
def colocate_slots(model: Any) -> Iterator[None]:
    """Return a context for a step, in which optimizers keep and update slots on the devices of variables.

    Slots are created outside of the graph that is being traced: TensorFlow traces a function that creates variables twice. A
    `LossScaleOptimizer` needs the second trace, because it scales losses by a constant until it is built.
    """
    homes = {tf_variable(variable).device for variable in model.trainable_variables}
    with contextlib.ExitStack() as replaced:
        for optimizer in optimizers_of(model):
            inner = getattr(optimizer, "inner_optimizer", optimizer)  # in a `LossScaleOptimizer`
            if inner is optimizer:
                replaced.enter_context(
                    replacing(optimizer, build=partial(_build_in_thread, optimizer, optimizer.build))
                )
            add = partial(_add_slot_at_home, inner.add_variable_from_reference)
            replaced.enter_context(replacing(inner, add_variable_from_reference=add))
            replaced.enter_context(replacing_gradient_sum(inner, _copy_home))
            if len(homes) > 1:
                replaced.enter_context(replacing(inner, apply=partial(_apply_at_home, inner.apply, homes)))
        yield


def _build_in_thread(optimizer: Any, build: Callable[[Any], None], variables: Any) -> None:
    """Build an optimizer in another thread, which has no graph. In `tf.init_scope`, the graph would create the variables."""
    import keras

    def build_in_scope() -> None:
        with keras.name_scope(optimizer.name, caller=optimizer):  # which this thread does not have
            build(variables)

    with ThreadPoolExecutor(1, "devicemap optimizer") as thread:
        thread.submit(build_in_scope).result()


def _copy_home(gradients_and_variables: Any) -> list[tuple[Any, Any]]:
    """Copy gradients to the devices of their variables. Ops without a device would send them through the host."""
    copied = []
    for gradient, variable in gradients_and_variables:
        with tf.device(tf_variable(variable).device):
            copied.append((None if gradient is None else tf.identity(gradient), variable))
    return copied


def _add_slot_at_home(add: Callable[..., Any], reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    with tf.device(tf_variable(reference_variable).device):
        return add(reference_variable, *args, **kwargs)


def _apply_at_home(apply: Callable[..., Any], homes: set[str], grads: Any, trainable_variables: Any = None) -> Any:
    """Run `Optimizer.apply`, whose arguments have these names, with gradients on the devices of their variables."""
    if trainable_variables is not None:  # otherwise, Keras takes those for which the optimizer was built
        grads = [gradient for gradient, _ in _copy_home(zip(grads, trainable_variables))]
    graph = tf.compat.v1.get_default_graph()
    with contextlib.nullcontext() if tf.executing_eagerly() else graph.device(partial(home_of_inputs, devices=homes)):
        return apply(grads, trainable_variables)
