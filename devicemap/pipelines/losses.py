"""The losses of a pipeline, computed by its last stage for each row of a microbatch.

    value = scale * sum of w * l    over the elements l of the rows' losses, with their weights and masks w

A Keras reduction determines the scale. It may depend on the outputs of all rows, as with masks. Then gradients are multiplied
by it at the end, so that no backward pass waits for all forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradient_links import add_gradients
from devicemap._tensorflow.keras import MASK, loss_of_function, mask_of, overrides_call, tf_variable
from devicemap.compile.graph_builder import copy_leaves
from devicemap.errors import OptionError, failure
from devicemap.pipelines.pipeline_graph import PipelineGraph
from devicemap.pipelines.stages import pack

_OF_ONE_ROW = (
    "binary_crossentropy binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy "
    "categorical_generalized_cross_entropy categorical_hinge cosine_similarity ctc huber kl_divergence log_cosh "
    "mean_absolute_error mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error poisson "
    "sparse_categorical_crossentropy"
).split()
"""Losses of Keras whose value for a row depends on that row alone.

Not among them are `hinge` and `squared_hinge`, which use all labels, and `circle`, `dice` and `tversky`, which use all rows.
"""


def is_of_one_row(function: Any) -> bool:
    """Whether a function is one of these losses."""
    import keras

    return any(function is getattr(keras.losses, name, None) for name in _OF_ONE_ROW)


def _is_of_keras(loss: Any) -> bool:
    return str(getattr(getattr(loss, "fn", None), "__module__", None)).startswith("keras.")


@dataclass(frozen=True)
class Losses:
    """The losses of a pipeline's outputs, which are added."""

    each: Any
    """A `keras.losses.Loss`, or a list, tuple or dict of them. Outputs without a loss have `None`. A single loss applies to
    each output if it is one of Keras's own, and otherwise to all outputs at once."""

    factors: Any = None
    """Factors of the losses: numbers like `each`, or by output, or `None`."""

    names: Sequence[str] = ()
    """Names of the outputs, which are the keys of dicts if the outputs are a list."""

    @classmethod
    def of(cls, loss: Any, factors: Any = None, names: Sequence[str] = ()) -> Losses:
        """Check the arguments `loss` and `loss_weights` of Keras's `compile`.

        Raises:
            OptionError: for a loss that `as_loss` refuses, losses of several reductions, or another number of factors.
        """
        each = tf.nest.map_structure(lambda given: None if given is None else as_loss(given), loss)
        if len({part.reduction for part in tf.nest.flatten(each) if part is not None}) != 1:
            raise OptionError(f"loss={loss!r}; expected at least one loss, and the same reduction of all losses")
        if factors is not None:
            given = tf.nest.flatten(factors)
            by_name = isinstance(each, Mapping) and isinstance(factors, Mapping)
            if len(given) != len(tf.nest.flatten(each)) or (by_name and {*factors} != {*each}):
                raise OptionError(f"loss_weights={factors!r}; expected one number per loss, for loss={loss!r}")
            in_order_of_outputs = isinstance(each, Mapping) and isinstance(factors, list | tuple)
            factors = factors if in_order_of_outputs else tf.nest.pack_sequence_as(each, given)
        return cls(each, factors, names)

    @property
    def reduction(self) -> str:
        """The reduction of all losses."""
        return next(each.reduction for each in tf.nest.flatten(self.each) if each is not None)

    @property
    def takes_all_outputs(self) -> bool:
        """Whether there is one loss of all outputs, which Keras would compute for each output."""
        return not tf.nest.is_nested(self.each) and not _is_of_keras(self.each)

    def by_row(self, outputs: Any, y: Any, *weight: Any) -> list[Any]:
        """Return a sum of weighted losses for each row, `[rows]`, from outputs, targets and perhaps a sample weight.

        Unless their sum is divided by the number of rows or not at all, return the divisor by row, too, `[rows]`.
        """
        totals, divisors = [], list[Any]()
        for loss, factor, arguments in self.match_outputs(outputs, y, *weight):
            total, *divisor = _of_one(loss, *arguments)
            totals.append(total if factor is None else _product(factor, total))
            divisors += divisor
        if len(totals) > 1 and divisors:
            raise failure(
                "one of several losses has a mask, or is a mean by sample weights. Then each loss would need a divisor of its "
                "own; give one function (y, outputs) that returns a loss for each row"
            )
        return [tf.add_n([tf.cast(total, totals[0].dtype) for total in totals]), *divisors]

    def check_rows(self, outputs: Any, y: Any) -> None:
        """Raise `OptionError` if a loss that is not Keras's own depends on other rows, for random rows of these specs."""
        from devicemap.pipelines.comparisons import check_rows_are_independent

        nest = outputs, y
        specs = tf.nest.flatten(nest)
        own = [each for each in tf.nest.flatten(self.each) if each is not None and not _is_of_keras(each)]
        if not own or not all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in specs):
            return

        def run(tensors: list[Any]) -> list[Any]:
            pairs = self.match_outputs(*pack(nest, tensors))
            return [loss.call(target, output) for loss, _, (output, target) in pairs if loss in own]

        def run_with_labels(tensors: list[Any]) -> list[Any]:  # a loss may count labels that equal 1
            return run(
                [tf.cast(tensor > 0, tensor.dtype) if tensor.dtype.is_floating else tensor for tensor in tensors]
            )

        name = getattr(getattr(own[0], "fn", None), "__name__", own[0].name)
        advice = "compute such a loss outside of the pipeline, or with microbatches=1"
        with tf.init_scope():
            if tf.executing_eagerly():
                for function in (run, run_with_labels):
                    check_rows_are_independent(f"the loss {name}", function, [*map(copy, specs)], advice)

    def match_outputs(self, outputs: Any, y: Any, weight: Any = None) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Yield each loss with its factor and its arguments: an output, its targets and perhaps its weights."""
        if self.takes_all_outputs or not (tf.nest.is_nested(self.each) or tf.nest.is_nested(outputs)):
            yield self.each, self.factors, [outputs, y, *([] if weight is None else [weight])]
            return
        if not tf.nest.is_nested(outputs):
            outputs, y = [outputs], y if tf.nest.is_nested(y) else [y]
        if isinstance(outputs, Mapping):
            keys: Sequence[Any] = sorted(outputs)
        else:
            keys = self.names if len(self.names) == len(outputs) else range(len(outputs))

        def by_output(nest: Any) -> Mapping[Any, Any]:
            if not isinstance(nest, list | tuple):
                return nest if isinstance(nest, Mapping) else dict.fromkeys(keys, nest)
            if len(nest) != len(keys):
                raise failure(f"the outputs are {[*keys]}, and there are {len(nest)} losses, weights or targets")
            return dict(zip(keys, nest))

        losses, factors, results, weights = map(by_output, (self.each, self.factors, outputs, weight))
        targets = by_output(y) if tf.nest.is_nested(y) else {}
        for key, loss in losses.items():
            if loss is None:
                continue
            if any(key not in nest for nest in (results, targets, weights)):
                raise failure(
                    f"there is a loss of the output {key!r}; the outputs are {[*results]}, the targets are "
                    f"{[*targets] or 'one tensor'}, and sample weights would be those of {[*weights]}"
                )
            given = weights.get(key)
            yield loss, factors.get(key), [results[key], targets[key], *([] if given is None else [given])]


def as_loss(loss: Any) -> Any:
    """Convert a `keras.losses.Loss`, a function `(y, outputs)`, or a name to a `keras.losses.Loss`, like Keras's `compile`.

    Raises:
        OptionError: for other objects, and if the loss of a row depends on other rows.
    """
    import keras

    try:
        found = keras.losses.get(loss)
    except ValueError:
        found = None
    if not callable(found):
        raise OptionError(
            f"loss={loss!r}; expected a keras.losses.Loss, a function of (y, outputs), or the name of one"
        )
    if not isinstance(found, keras.losses.Loss):
        found = loss_of_function(found)
    has_axis = getattr(found, "_fn_kwargs", {}).get("axis") is not None  # of one row, as for `dice` of images
    if overrides_call(found) or (_is_of_keras(found) and not has_axis and not is_of_one_row(found.fn)):
        raise OptionError(
            f"loss={loss!r}; the loss of a row must depend on that row only, because stages see some rows at a time. Give a "
            "function (y, outputs) that returns a loss for each row"
        )
    if found.reduction in (None, "none"):
        raise OptionError(
            f"loss={loss!r} has no reduction; expected 'sum_over_batch_size', 'sum' or 'mean_with_sample_weight'"
        )
    return found


def _of_one(loss: Any, outputs: Any, y: Any, *weight: Any) -> list[Any]:
    """Return the sum of the elements of one loss for each row, and perhaps its divisor, as `Losses.by_row`."""
    losses: list[Any] = []

    def call(y_true: Any, y_pred: Any) -> Any:
        losses.append(loss.call(y_true, y_pred))
        _check_aligned(losses[-1], *weight)
        return losses[-1]

    weighted = _elements(loss, call, y, outputs, *weight)
    shape = losses[0].shape
    if not shape.rank or shape[0] is not None:
        raise failure(f"the loss has the shape {shape}; it must return a loss for each row, of shape [rows, ...]")
    total = _sum_of_rows(weighted)
    if loss.reduction == "sum":
        return [total]
    by_weight = loss.reduction == "mean_with_sample_weight"
    masks = [mask_of(tensor) for tensor in (outputs, losses[0]) if mask_of(tensor) is not None]
    size = shape[1:].num_elements()
    if size and not masks and not (by_weight and weight):
        return [total / size]
    # As in Keras, each weight counts once in a mean by weights, also if it is that of several elements.
    counted = [*masks, *weight, losses[0]][0] if by_weight else losses[0]
    ones = tf.ones_like(counted, weighted.dtype)
    if mask_of(losses[0]) is not None:
        setattr(ones, MASK, mask_of(losses[0]))
    weights = _elements(loss, lambda *_: ones, y, outputs, *(weight if by_weight else ()))
    return [total, _sum_of_rows(weights)]


def _elements(loss: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the results of `call`, `[rows, ...]`, with weights and masks, before Keras reduces them."""
    unreduced = object.__new__(type(loss))  # copy.copy would serialize it
    vars(unreduced).update(vars(loss), reduction="none", call=call)
    return unreduced(*arguments)


def _check_aligned(losses: Any, weight: Any = None) -> None:
    """Raise an error if Keras would multiply losses of a row by weights of another row, by broadcasting."""
    shapes = [getattr(each, "shape", tf.TensorShape(None)) for each in (losses, weight)]
    if any(shape.rank is None for shape in shapes):
        return
    lower, higher = sorted(shapes, key=lambda shape: shape.rank)
    if higher.rank > lower.rank + (higher[-1:] == [1]):
        raise failure(
            f"sample_weight has the shape {shapes[1]}, and the losses {shapes[0]}. Keras would multiply losses of a row by "
            "weights of others; pass weights of the rank of the losses, such as [rows, 1]"
        )


def _sum_of_rows(elements: Any) -> Any:
    return tf.reduce_sum(tf.reshape(elements, [tf.shape(elements)[0], -1]), 1)


def differentiate(
    losses: Losses, build: Callable[[], PipelineGraph], variables: Callable[[], Sequence[Any]], scale: Any
) -> tuple[PipelineGraph, Any, list[Any]]:
    """Build a pipeline with losses. Return it, the sum of the losses with other losses, and the gradients times `scale`.

    `build` returns the graph of the pipeline. After that, `variables` returns the variables to differentiate.
    """
    with tf.GradientTape() as tape:
        graph = build()
        total, *divisors = graph.totals
        rows = tf.cast(graph.rows, total.dtype)
        divisor = tf.ones_like(rows) if losses.reduction == "sum" else rows
        factor = None
        if divisors and graph.losses:  # all backward calls wait for the divisor
            divisor = tf.stop_gradient(divisors[0])
        elif divisors:
            factor = tf.math.divide_no_nan(rows, divisors[0])
        mean = tf.math.divide_no_nan(total, divisor)
        others = [tf.cast(each, mean.dtype) for _, each in graph.losses]
        target = _product(scale, tf.add_n([mean, *others]))
    known = variables()
    gradients = tape.gradient(target, [tf_variable(variable) for variable in known])
    value = tf.add_n([mean if factor is None else mean * factor, *others])
    for i, variable in enumerate(known):
        with tf.device(tf_variable(variable).device):
            terms = [gradients[i]] if gradients[i] is not None else []
            # If stages share a variable, its gradient may be on another device.
            terms = copy_leaves(terms) if factor is None else [_product(factor, term) for term in terms]
            if getattr(variable, "regularizer", None) is not None:
                with tf.GradientTape() as tape:
                    penalty = variable.regularizer(variable)
                    target = _product(scale, penalty)
                terms.append(tape.gradient(target, tf_variable(variable)))
                value += tf.cast(penalty, value.dtype)
            gradients[i] = add_gradients(terms) if terms else None
    return graph, value, gradients


def _product(scalar: Any, tensor: Any) -> Any:
    scalar = tf.cast(scalar, tensor.dtype) if tf.is_tensor(scalar) else tf.constant(scalar, tensor.dtype)  # not float32
    return tf.math.scalar_mul(scalar, tensor)
