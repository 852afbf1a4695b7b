"""One try of an op in one form, and whether it gives, vectorised, what it gives row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.compile.forms import Form
from devicemap.compile.vectorize import vectorize

COUNTS = (0, 1, 2, 5)
"""How many rows each is tried on."""

_TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 2e-4, "complex64": 2e-4}


@dataclass(frozen=True)
class Input:
    """What an op is given: an array for each row, or one that all rows share."""

    shape: tuple[int, ...]
    """Of one row."""

    dtype: str

    stacked: bool = True

    unknown: bool = False
    """Whether its lengths are only known when it runs."""

    values: Callable[[np.random.Generator, tuple[int, ...], str], np.ndarray] | None = None
    """What makes its values; `None`: such as most ops take."""


@dataclass(frozen=True)
class Trial:
    """An op, called on some inputs."""

    op: str
    """Its type; several, with a space between, where all of them are tried."""

    call: Callable[..., Any]
    """`(*inputs) -> its outputs`, by this op and no other one that depends on the inputs."""

    inputs: tuple[Input, ...]

    random: bool = field(default=False)
    """Whether it draws: then numbers are compared by their range and their number alone."""


def values(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers that most ops take."""
    kind = tf.as_dtype(dtype)
    if dtype == "string":
        return random.integers(0, 99, shape).astype(str).astype(object)
    if kind.is_bool:
        return random.integers(0, 2, shape).astype(bool)
    if kind.is_complex:
        return (random.uniform(-2, 2, shape) + 1j * random.uniform(-2, 2, shape)).astype(kind.as_numpy_dtype)
    if kind.is_integer:
        return random.integers(1, 5, shape).astype(kind.as_numpy_dtype)
    return random.uniform(-2, 2, shape).astype(kind.as_numpy_dtype)


def outcomes(trials: Sequence[Trial]) -> dict[Form, tuple[bool, bool]]:
    """For each form that was met: whether all trials of it gave the same, and whether they had the same gradients, too."""
    found: dict[Form, tuple[bool, bool]] = {}
    for trial, (forms, same, gradients) in zip(trials, _try(list(trials))):
        for form in forms:
            if form.op in trial.op.split():
                before = found.get(form, (True, True))
                found[form] = (before[0] and same, before[1] and same and gradients)
    return found


def _try(trials: list[Trial]) -> list[tuple[set[Form], bool, bool]]:
    """The forms of each trial, and whether its results and gradients are right. Many are tried in one function."""
    made = _Traced(trials)
    if not sum(made.counts):
        return [(set(), False, False)] * len(trials)
    try:
        made.run_by_row()
    except Exception:  # without a kernel for these, or with lengths that do not fit
        return [(set(), False, False)] if len(trials) == 1 else _apart(trials)
    try:
        made.vectorize()
        right = made.values_right()
    except Exception:
        return [(made.forms[0], False, False)] if len(trials) == 1 else _apart(trials)
    try:
        gradients = made.gradients_right()
    except Exception:  # there are none, or not of such
        return [(made.forms[0], right[0], False)] if len(trials) == 1 else _apart(trials)
    return list(zip(made.forms, right, gradients))


def _apart(trials: list[Trial]) -> list[tuple[set[Form], bool, bool]]:
    size = max(1, len(trials) // 8)
    return [each for part in batches(trials, size) for each in _try(list(part))]


class _Traced:
    """Trials as one function of one row."""

    def __init__(self, trials: list[Trial]):
        self.trials = trials
        self.forms: list[set[Form]] = [set() for _ in trials]
        random = np.random.default_rng(len(trials))
        self.shared: list[list[Any]] = []
        self.rows: list[Any] = []
        self.specs: list[Any] = []
        for trial in trials:
            self.shared.append([])
            for each in trial.inputs:
                make = each.values or values
                if each.stacked:
                    array = make(random, (max(COUNTS), *each.shape), each.dtype)
                    self.rows.append(tf.constant(array, each.dtype))
                    inner = [None] * len(each.shape) if each.unknown else each.shape
                    self.specs.append(tf.TensorSpec([None, *inner], each.dtype))
                else:
                    self.shared[-1].append(tf.constant(make(random, each.shape, each.dtype), each.dtype))

        @tf.function(autograph=False)
        def row_fn(*rows: Any) -> list[list[Any]]:
            given, results = iter(rows), []
            for i, trial in enumerate(trials):
                own = iter(self.shared[i])
                arguments = [next(given) if each.stacked else next(own) for each in trial.inputs]
                try:
                    with tf.name_scope(f"trial_{i}"):
                        result = trial.call(*arguments)
                except (ValueError, TypeError, tf.errors.OpError):  # the op itself takes no such inputs
                    result = []
                outputs = result if isinstance(result, list | tuple) else [result]
                results.append([output for output in outputs if isinstance(output, tf.Tensor)])
            self.counts = [len(each) for each in results]
            return [output for each in results for output in each]

        self.row_fn = row_fn.get_concrete_function(*(tf.TensorSpec(s.shape[1:], s.dtype) for s in self.specs))

    def run_by_row(self) -> None:
        """What all is held against."""
        self.by_row = [self.row_fn(*(x[i] for x in self.rows)) for i in range(max(COUNTS))]

    def vectorize(self) -> None:
        """As a map does it; takes down the forms."""
        self.vectorized = vectorize(self.row_fn, self.specs, self._take_down)

    def _take_down(self, form: Form, op: Any) -> None:
        scope = op.name.split("/")[0]
        number = int(scope.removeprefix("trial_")) if scope.startswith("trial_") else 0
        self.forms[number].add(form)

    def values_right(self) -> list[bool]:
        """Whether each trial gives the same for all numbers of rows."""
        right = [True] * len(self.trials)
        for count in COUNTS:
            got = iter(self.vectorized(*(x[:count] for x in self.rows)))
            spec = iter(self.row_fn.outputs)
            number = 0
            for i, trial in enumerate(self.trials):
                for _ in range(self.counts[i]):
                    one, each = next(got), next(spec)
                    wanted = [self.by_row[row][number] for row in range(count)]
                    right[i] &= _same_rows(one, wanted, each, trial.random)
                    number += 1
        return right

    def gradients_right(self) -> list[bool]:
        """Whether each trial has the same gradients; those that are none are zeros."""
        followed = [x for x in self.rows if x.dtype.is_floating or x.dtype.is_complex]
        shared = [x for each in self.shared for x in each if x.dtype.is_floating or x.dtype.is_complex]
        of_trial = [
            sum(each.stacked is stacked and (tf.as_dtype(each.dtype).is_floating or tf.as_dtype(each.dtype).is_complex)
                for each in trial.inputs)
            for trial in self.trials for stacked in (True, False)
        ]  # fmt: skip
        with tf.GradientTape() as tape:
            tape.watch([*followed, *shared])
            got = _weighed(self.vectorized(*(x[:2] for x in self.rows)))
        got_gradients = tape.gradient(got, [*followed, *shared])
        with tf.GradientTape() as tape:
            tape.watch([*followed, *shared])
            rows = [self.row_fn(*(x[i] for x in self.rows)) for i in range(2)]
            wanted = _weighed([tf.stack(list(each)) for each in zip(*rows)])
        wanted_gradients = tape.gradient(wanted, [*followed, *shared])
        same = [_same_gradient(a, b) for a, b in zip(got_gradients, wanted_gradients)]
        right, of_rows, of_shared = [], iter(same[: len(followed)]), iter(same[len(followed) :])
        for i, trial in enumerate(self.trials):
            own = [next(of_rows) for _ in range(of_trial[2 * i])] + [
                next(of_shared) for _ in range(of_trial[2 * i + 1])
            ]
            right.append(all(own) or trial.random)
        return right


def _weighed(outputs: Sequence[Any]) -> Any:
    """A number that depends on every element of the results in another way."""
    total = tf.constant(0.0, tf.float64)
    for output in outputs:
        if output.dtype.is_floating or output.dtype.is_complex:
            real = [tf.math.real(output), tf.math.imag(output)] if output.dtype.is_complex else [output]
            for part in real:
                flat = tf.cast(tf.reshape(part, [-1]), tf.float64)
                total += tf.reduce_sum(flat * tf.cast(1 + tf.range(tf.size(flat)) % 7, tf.float64))
    return total


def _same_gradient(got: Any, wanted: Any) -> bool:
    if got is None or wanted is None:
        other = wanted if got is None else got
        return other is None or not np.any(tf.convert_to_tensor(other).numpy())
    return _close(tf.convert_to_tensor(got).numpy(), tf.convert_to_tensor(wanted).numpy(), got.dtype)


def _same_rows(got: Any, wanted: list[Any], spec: Any, random: bool) -> bool:
    if got.dtype != spec.dtype or got.shape.rank != 1 + (spec.shape.rank or 0) or spec.shape.rank is None:
        return False
    if got.shape[0] != len(wanted) or not spec.shape.is_compatible_with(got.shape[1:]):
        return False
    if not wanted:
        return True
    if any(each.shape != got.shape[1:] for each in wanted):
        return False
    a, b = got.numpy(), np.stack([each.numpy() for each in wanted])
    if random:
        distinct = len(np.unique(a)) == a.size if got.dtype.is_floating and got.dtype.size > 2 else True
        return distinct and (a.size == 0 or bool(np.abs(a).max() < 10))
    return _close(a, b, got.dtype)


def _close(a: np.ndarray, b: np.ndarray, dtype: Any) -> bool:
    if a.shape != b.shape:
        return False
    if not (dtype.is_floating or dtype.is_complex):
        return bool(np.array_equal(a, b))
    wide = np.complex128 if dtype.is_complex else np.float64
    tolerance = _TOLERANCE.get(dtype.name, 1e-7)
    return bool(np.allclose(a.astype(wide), b.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True))


def batches(trials: Sequence[Trial], size: int) -> list[Sequence[Trial]]:
    """Trials in portions that one function takes."""
    return [trials[i : i + size] for i in range(0, len(trials), size)]


def product(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Every choice of each name."""
    return [dict(zip(choices, each)) for each in itertools.product(*choices.values())]
