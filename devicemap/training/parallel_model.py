"""A parallelized model: its steps, in which calls of the model and of its layers are mapped, and its new methods."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import keras
import tensorflow as tf

from devicemap._tensorflow.keras import (
    build_compiled,
    clear_step_functions,
    layers_of,
    losses_of,
    overrides,
    traces_with_batches,
)
from devicemap.api import DeviceMap
from devicemap.data.shards import shard_sizes
from devicemap.data.structure import freeze
from devicemap.devices import is_out_of_memory
from devicemap.errors import OptionError, add_note, brief, function_error, warn_user
from devicemap.inspect.plan import Plan
from devicemap.inspect.training import DeviceShare, TrainingReport
from devicemap.inspect.verify import Verification, of_first_layer
from devicemap.training.forward import ForwardPass
from devicemap.training.mapping import mapping
from devicemap.training.row_losses import RowLosses, needing_all_rows
from devicemap.training.variables import colocate_slots

STEPS = "train_step", "test_step", "predict_step"
MAKERS = "make_train_function", "make_test_function", "make_predict_function"
_MEASURES = "__call__", "compute_loss", "compute_metrics"
METHODS = "detach", "explain", "report", "verify"
_OF_SOME_ROWS = (
    "Each device sees some of the rows of a batch. If the step works after model.detach(), a layer combines rows: do that in "
    "compute_loss, or in a train_step of the model"
)
"""Advice for errors of ops, such as those of tensors whose shapes do not match."""

_OUT_OF_SCOPE = "is out of scope and cannot be used here"
"""A part of TensorFlow's message for a tensor that is used outside of its graph."""

_KEPT_TENSOR = (
    "If a layer keeps a tensor of its call, for instance as an attribute, other calls and the step cannot read it, because the "
    "layer runs on each device: let it return the tensor, or add it by add_loss"
)

_ADVICE = (
    "A smaller batch_size needs less memory on each device. accumulate= and recompute= of devicemap.parallelize need less for "
    "the same step, devicemap.spread_variables() distributes the optimizer's slots, and a devicemap.Pipeline the layers"
)

_replacing = threading.RLock()
"""Held while methods of layers and optimizers are replaced. Threads may train models that share layers."""


class ParallelModel:
    """A parallelized model: its steps, and the methods that the model gets."""

    def __init__(self, model: Any, devices: list[str], make_forward: Callable[[], ForwardPass], accumulate: int):
        self._model, self._devices = model, devices
        self._make_forward, self._accumulate = make_forward, accumulate
        self._own_steps = {name: vars(model)[name] for name in STEPS if name in vars(model)}
        self._building: set[str] = set()
        """Steps of the model's own that have run to build layers."""
        self._sizes: Counter[int] = Counter()
        """The number of training steps by their number of rows, since the last call of `fit`."""
        self._begins = False
        """Whether the next step is the first one of `fit`."""
        self._maps_nothing = False
        """Whether training steps call no layer on rows."""

    def build(self, batch: Any = None, step: str = "predict_step") -> bool:
        """Build unbuilt layers, by a trace of a custom step with a batch, or otherwise of the model with its inputs.

        Return whether the step has to build them itself, on one device, because the model runs eagerly.
        """
        if step in self._own_steps or overrides(self._model, step):
            if batch is None or step in self._building or all(layer.built for layer in layers_of(self._model)[1:]):
                return False
            self._building.add(step)
            if self._model.run_eagerly:
                return True
            run = self._plain(step)
        elif self._model.built:
            return False
        elif batch is None:
            raise OptionError(
                f"{self._model.name} is not built yet: its variables do not exist. Fit it, call it on a batch, or use "
                "model.build(...) first"
            )
        else:

            def run(batch: Any) -> Any:
                return self._model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=False)

        with _replacing, colocate_slots(self._model):  # a run would change counters of layers
            tf.function(run, autograph=False).get_concrete_function(batch)
        return False

    def _plain(self, name: str) -> Callable[[Any], Any]:
        """Return the step of the model itself, without mapped calls."""
        step = self._own_steps.get(name, getattr(type(self._model), name))
        if hasattr(step, "python_function"):  # a tf.function, which keeps traces without mapped calls
            step = tf.function(step.python_function)
        return step if name in self._own_steps else partial(step, self._model)

    def attach(self) -> None:
        """Replace the steps of the model, and add the methods."""
        own = vars(self._model)
        own |= {name: partial(self._step, name) for name in STEPS}
        own |= {name: partial(self._make, name) for name in MAKERS}
        own |= {name: getattr(self, name) for name in METHODS}
        clear_step_functions(self._model)

    def detach(self) -> Any:
        """Give the model back to one device and return it."""
        for name in (*STEPS, *MAKERS, *METHODS):
            vars(self._model).pop(name, None)
        vars(self._model).update(self._own_steps)
        clear_step_functions(self._model)
        return self._model

    def explain(self, data_or_spec: Any) -> Plan:
        """Return the plan of the forward pass of a training step, as `DeviceMap.explain` does.

        Args:
            data_or_spec: inputs of the model, or a nest of `tf.TensorSpec`s in their place.
        """
        if not overrides(self._model, "call"):
            raise OptionError(
                f"{self._model.name} has no call; explain a layer that its steps call, by devicemap.DeviceMap(layer, "
                "batched=True)"
            )
        self.build()
        forward, structure = self._make_forward(), tf.nest.map_structure(lambda leaf: None, data_or_spec)
        mapper = DeviceMap(
            lambda *leaves: forward.outputs_in_training(tf.nest.pack_sequence_as(structure, leaves)),
            devices=forward.devices,
            batched=True,
            output_device=forward.home,
            name=self._model.name,
        )
        plan = mapper.explain(tuple(tf.nest.flatten(data_or_spec)))
        gathered_for = self._own_methods("train_step") or tuple(each.name for each in needing_all_rows(self._model))
        return replace(plan, microbatches=self._accumulate, gathered_for=gathered_for)

    def report(self) -> TrainingReport:
        """Return the number of rows that each device computed in training steps since the last call of `fit`."""
        devices = self._devices
        rows = Counter(dict.fromkeys(devices, 0))
        for size, steps in self._sizes.items():
            sizes = [size] if self._maps_nothing else shard_sizes(size, len(devices))
            for device, shard in zip(devices, sizes):
                rows[device] += shard * steps
        shares = tuple(DeviceShare(*each) for each in rows.items())
        return TrainingReport(self._model.name, self._sizes.total(), shares, self._accumulate)

    def verify(
        self, data: Any, rows: int | None = None, *, tolerance: float | None = None, seconds: float | None = 30.0
    ) -> Verification:
        """Run the model as in `predict` on some rows, and compare each layer's output, as `DeviceMap.verify` does.

        Args:
            data: inputs of the model.
            rows, tolerance, seconds: as for `DeviceMap.verify`.

        Returns:
            The findings. In a Sequential or functional model, the first layer whose output differs, because the output of
            each layer after it differs, too.
        """
        model, leaves, names = self._model, tuple(tf.nest.flatten(data)), dict[str, str]()
        if getattr(model, "inputs", None):
            layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
            names = {f"{i:04}": layer.name for i, layer in enumerate(layers)}  # the order of keys is that of layers
            model = keras.Model(model.inputs, {key: layer.output for key, layer in zip(names, layers)})

        def infer(*leaves: Any) -> Any:
            outputs = model(tf.nest.pack_sequence_as(data, leaves), training=False)
            if not names:
                return outputs
            return {key: tuple(outputs[key]) if isinstance(outputs[key], list) else outputs[key] for key in names}

        mapper = DeviceMap(infer, devices=self._devices, batched=True, name=self._model.name)
        verification = mapper.verify(leaves, rows, tolerance=tolerance, seconds=seconds)
        return of_first_layer(verification, names)

    def _make(self, name: str, force: bool = False) -> Any:
        """Create the function of a loop in place of Keras, which would compile it with XLA for one device."""
        self._begins = name == "make_train_function"
        made = name.removeprefix("make_")
        step = made.replace("function", "step")
        if getattr(vars(self._model).get(step), "func", None) != self._step:
            raise OptionError(
                f"{self._model.name} got another {step} after it was parallelized; set it before, or call model.detach(), set "
                "it, and parallelize the model again"
            )
        if force or getattr(self._model, made) is None:
            setattr(self._model, made, partial(self._run, step, {}))
        return getattr(self._model, made)

    def _run(self, step: str, functions: dict[Any, Any], batches: Iterable[Any]) -> Any:
        """Run `steps_per_execution` steps. Return the results of the last one, or the outputs of all in `predict`."""
        specs = getattr(batches, "element_spec", None)  # Keras weights some means by static numbers of rows
        if any(isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(specs)):
            specs = None
        if step == "train_step":
            if self._begins and not isinstance(batches, Generator):  # `train_on_batch` makes one
                self._sizes.clear()
            self._begins = False
        results = []
        for batch in map(_without_optionals, islice(iter(batches), self._model.steps_per_execution)):
            try:
                results.append(self._function(step, functions, specs, batch)(batch))
            except tf.errors.OpError as error:
                if not is_out_of_memory(error):
                    if isinstance(error, tf.errors.InvalidArgumentError) and len(self._devices) > 1:
                        add_note(error, _OF_SOME_ROWS)
                    raise
                message = f"{self._model.name} ran out of memory: {brief(error)}. {_ADVICE}"
                raise function_error(message, error) from error
            except ValueError as error:
                if _OUT_OF_SCOPE in str(error):
                    add_note(error, _KEPT_TENSOR)
                raise
            if step == "train_step":
                self._sizes[count_of(batch) or 0] += 1
        if not results:
            raise StopIteration
        if step == "predict_step":
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *results)
        return results[-1]

    def _function(self, step: str, functions: dict[Any, Any], specs: Any, batch: Any) -> Any:
        """Return the function of a batch that runs a step, which is traced unless the model runs eagerly."""
        if self._model.run_eagerly:
            return partial(self._step, step)
        self.build(batch, step)
        if not functions and step != "predict_step" and not self._own_methods(step):
            with _replacing:  # builds what the step would, so that it is traced once, and knows its losses
                build_compiled(self._model, batch)
        if len(losses_of(self._model)) > 1 and traces_with_batches(self._model):  # each has a mean in the history
            specs = None
        # A step without rows has no mapped calls. The first step of Keras builds the losses if `build_compiled` could not.
        key = freeze(specs), count_of(batch) == 0, bool(self._own_methods(step) or losses_of(self._model))
        if key not in functions:
            signature = None if specs is None else [specs]
            functions[key] = tf.function(partial(self._step, step), signature, autograph=False, reduce_retracing=True)
        return functions[key]

    def _own_methods(self, step: str) -> tuple[str, ...]:
        """Return the methods of a step that a model overrides. They may use outputs in any way."""
        own = {*self._own_steps, *(vars(self._model).keys() - STEPS)}
        return tuple(name for name in (step, *_MEASURES) if name in own or overrides(self._model, name))

    def _step(self, name: str, data: Any) -> Any:
        """Run a step of the model on a batch, with calls of the model and its layers on all devices."""
        step, rows, row_losses = self._plain(name), count_of(data), None
        if self.build(data, name):
            return step(data)
        microbatches = self._accumulate if name == "train_step" else 1
        with _replacing:
            forward = self._make_forward()
            if name != "predict_step" and not self._own_methods(name):  # which may take batches of any structure
                _, targets, _ = keras.utils.unpack_x_y_sample_weight(data)
                row_losses = None if targets is None else RowLosses(self._model, targets)
            mapped = mapping(forward, rows, microbatches, name != "predict_step", row_losses)
            with mapped, colocate_slots(self._model):
                results = step(data)
        if not forward.calls and len(self._devices) > 1 and rows != 0:
            self._maps_nothing |= name == "train_step"
            warn_user(
                f"{name} of {self._model.name} calls neither the model nor one of its layers on rows, so it runs on one "
                "device. Let the model have the layers that it calls as attributes, and call them themselves, not by "
                "stateless_call, nor in tf.vectorized_map",
            )
        return results


def count_of(batch: Any) -> int | None:
    """Return the number of rows of a batch, `None` if it is unknown."""
    shapes = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten(batch) if leaf is not None]
    return next((shape[0] for shape in shapes if shape.rank), None)


def _without_optionals(batch: Any) -> Any:
    """Replace empty optionals by `None`, as Keras does."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
