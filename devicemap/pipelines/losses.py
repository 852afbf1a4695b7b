"""The loss of a pipeline, computed by its last stage for each row of a microbatch.

    value = scale * sum of w * l    over the elements l of the rows' losses, with their weights and masks w

A Keras reduction determines the scale. It may depend on the outputs of all rows, as with masks. Then gradients are multiplied
by it at the end, so that no backward pass waits for all forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import added
from devicemap._tensorflow.keras import MASK, has_own_call, loss_of_function, mask_of, set_note, stored_in
from devicemap.compile.graph_builder import copied
from devicemap.errors import OptionError, failure
from devicemap.pipelines.composition import Composition
from devicemap.pipelines.stages import Passed

_OF_ALL_ROWS = ("hinge", "squared_hinge", "circle")
"""Keras functions whose value for a row depends on labels or outputs of other rows."""


def as_loss(loss: Any) -> Any:
    """Convert a `keras.losses.Loss`, a function `(y, outputs)`, or a name to a `keras.losses.Loss`, like Keras's `compile`.

    Raises:
        OptionError: for other objects, and if the loss of a row depends on other rows.
    """
    import keras

    try:
        found = keras.losses.get(loss)
    except ValueError as error:
        raise OptionError(f"loss={loss!r}; Keras has no loss of this name") from error
    if not callable(found):
        raise OptionError(
            f"loss={loss!r}; expected a keras.losses.Loss, a function of (y, outputs), or the name of one"
        )
    if not isinstance(found, keras.losses.Loss):
        found = loss_of_function(found)
    function = getattr(found, "fn", None)
    if has_own_call(found) or any(function is getattr(keras.losses, name, found) for name in _OF_ALL_ROWS):
        raise OptionError(
            f"loss={loss!r}; the loss of a row must depend on that row only, because stages see some rows at a time"
        )
    if found.reduction in (None, "none"):
        raise OptionError(
            f"loss={loss!r} has no reduction; expected 'sum_over_batch_size', 'sum' or 'mean_with_sample_weight'"
        )
    return found


class WithLoss:
    """The last stage of a pipeline, and the loss of each row.

    It is called with the inputs of the stage and `(y,)` or `(y, sample_weight)`. It returns the outputs, and a sum of weighted
    losses for each row, `[rows]`. Unless the sum is divided by the number of rows, it also returns the divisor by row,
    `[rows]`.
    """

    def __init__(self, stage: Callable[..., Any], loss: Any):
        self._stage, self._loss = stage, loss

    def __call__(self, given: Any, targets: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._with_sums(self._stage(*given) if type(given) is tuple else self._stage(given), *targets)

    @tf.autograph.experimental.do_not_convert
    def _with_sums(self, outputs: Any, y: Any, *weight: Any) -> tuple[Any, ...]:
        import keras

        losses: list[Any] = []
        of_keras = getattr(getattr(self._loss, "fn", None), "__module__", "").startswith("keras.")
        if of_keras and keras.tree.is_nested(outputs):
            raise failure(
                f"the loss {self._loss.name} takes one tensor, and the outputs are a {type(outputs).__name__} of "
                f"{len(outputs)}; give a function (y, outputs) of all outputs that returns a loss for each row"
            )

        def call(y_true: Any, y_pred: Any) -> Any:
            losses.append(self._loss.call(y_true, y_pred))
            _check_aligned(losses[-1], *weight)
            return losses[-1]

        weighted = self._elements(call, y, outputs, *weight)
        shape = losses[0].shape
        if not shape.rank or shape[0] is not None:
            raise failure(f"the loss has the shape {shape}; it must return a loss for each row, of shape [rows, ...]")
        total = _sum_of_rows(weighted)
        if self._loss.reduction == "sum":
            return outputs, total
        by_weight = self._loss.reduction == "mean_with_sample_weight"
        masks = [mask_of(tensor) for tensor in (outputs, losses[0]) if mask_of(tensor) is not None]
        size = shape[1:].num_elements()
        if size and not masks and not (by_weight and weight):
            return outputs, total / size
        # As in Keras, each weight counts once in a mean by weights, also if it is that of several elements.
        counted = [*masks, *weight, losses[0]][0] if by_weight else losses[0]
        ones = tf.ones_like(counted, weighted.dtype)
        if mask_of(losses[0]) is not None:
            set_note(ones, MASK, mask_of(losses[0]))
        weights = self._elements(lambda *_: ones, y, outputs, *(weight if by_weight else ()))
        return outputs, total, _sum_of_rows(weights)

    def _elements(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the results of `call`, `[rows, ...]`, with weights and masks, before Keras reduces them."""
        loss = object.__new__(type(self._loss))  # copy.copy would serialize it
        vars(loss).update(vars(self._loss), reduction="none", call=call)
        return loss(*arguments)


def _check_aligned(losses: Any, weight: Any = None) -> None:
    """Raise an error if Keras would multiply losses of a row by weights of another row, by broadcasting."""
    shapes = [getattr(each, "shape", tf.TensorShape(None)) for each in (losses, weight)]
    if any(shape.rank is None for shape in shapes):
        return
    lower, higher = sorted(shapes, key=lambda shape: shape.rank)
    if higher.rank > lower.rank + (higher[-1:] == [1]):
        raise failure(
            f"sample_weight has the shape {shapes[1]}, and the losses {shapes[0]}; expected a weight for each row, as [rows] "
            "or [rows, 1], or weights of the shape of the losses"
        )


def _sum_of_rows(elements: Any) -> Any:
    return tf.reduce_sum(tf.reshape(elements, [tf.shape(elements)[0], -1]), 1)


class TotalLoss:
    """The loss of a batch and its gradients, from a `Composition` that ends with `WithLoss`.

    Attributes:
        value: the loss, plus losses that layers add.
        passed: specs of the outputs and their attached tensors.
        outputs: indices of these among the results.
    """

    def __init__(self, loss: Any, made: Composition, tape: tf.GradientTape, scale: Any):
        """
        Args:
            loss: a result of `as_loss`.
            made: the results of the stages, which the tape has recorded.
            tape: a tape that is recording.
            scale: a scalar that the gradients are multiplied by.
        """
        outputs, *sums = made.passed.nest
        count, notes = len(tf.nest.flatten(outputs)), len(made.passed.notes)
        self.passed = Passed(outputs, made.passed.notes)
        self.outputs = [*range(count), *range(count + len(sums), count + len(sums) + notes)]
        total, *divisors = (made.total(count + i) for i in range(len(sums)))
        rows = made.rows(total.dtype)
        divisor = tf.ones_like(rows) if loss.reduction == "sum" else rows
        self._factor = None
        if divisors and made.losses:  # all backward calls wait for the divisor
            divisor = tf.stop_gradient(divisors[0])
        elif divisors:
            self._factor = tf.math.divide_no_nan(rows, divisors[0])
        mean = tf.math.divide_no_nan(total, divisor)
        others = [tf.cast(each, mean.dtype) for _, each in made.losses]
        with tape.stop_recording():
            self.value = tf.add_n([mean if self._factor is None else mean * self._factor, *others])
        self._tape, self._scale = tape, scale
        self._target = self._scaled(tf.add_n([mean, *others]))

    def gradients(self, variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of variables, on their devices; add the losses of their regularizers to the value."""
        found = self._tape.gradient(self._target, [stored_in(variable) for variable in variables])
        return [self._with_penalty(*pair) for pair in zip(variables, found)]

    def _scaled(self, loss: Any) -> Any:
        return loss * tf.cast(self._scale, loss.dtype)

    def _with_penalty(self, variable: Any, gradient: Any) -> Any:
        with tf.device(stored_in(variable).device):
            if gradient is not None:  # if stages share a variable, its gradient may be on another device
                gradient = copied([gradient])[0] if self._factor is None else _multiplied(gradient, self._factor)
            regularizer = getattr(variable, "regularizer", None)
            if regularizer is None:
                return gradient
            with tf.GradientTape() as tape:
                penalty = regularizer(variable)
                target = self._scaled(penalty)
            self.value += tf.cast(penalty, self.value.dtype)
            of_penalty = tape.gradient(target, stored_in(variable))
            return of_penalty if gradient is None else added([gradient, of_penalty])


def _multiplied(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_multiplied(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
