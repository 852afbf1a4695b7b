"""How far two numbers may be apart, and still be the same number, rounded differently."""

from __future__ import annotations

import math

import tensorflow as tf

from devicemap.base.devices import kind_of
from devicemap.tell.verify.comparison import Allowance, Array, largest_number

_EPSILON = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52}
"""The distance from 1 to the next number, which NumPy does not tell of bfloat16."""

_TENSOR_FLOAT_EPSILON = 2.0**-10
"""float32 keeps ten bits of a factor where GPUs multiply in TensorFloat-32, which TensorFlow lets them by default."""


def allowance(tolerance: float | None, devices: tuple[str, ...]) -> Allowance:
    """By how much the numbers of an output may differ, measured by the largest number of that output.

    Sums of numbers of both signs are small beside what rounding leaves of them, so that a number is not a measure for
    itself. Half of the digits are far more than sums lose in practice, and far less than what another batch changes.

    Args:
        tolerance: relative; `None`: half of the digits of a dtype have to agree.
        devices: full names of the devices that computed the outputs.

    Examples:
        >>> import numpy as np
        >>> round(allowance(None, ("/device:CPU:0",))(tf.float32, np.array([1.0, -2.0])), 6)
        0.000691
    """
    tensor_float = tf.config.experimental.tensor_float_32_execution_enabled() and any(
        kind_of(device) == "GPU" for device in devices
    )

    def allowed(dtype: tf.DType, wanted: Array) -> float:
        if tolerance is not None:
            return tolerance * largest_number(wanted)
        kind = dtype.real_dtype
        epsilon = _TENSOR_FLOAT_EPSILON if tensor_float and kind == tf.float32 else _EPSILON[kind]
        return math.sqrt(epsilon) * largest_number(wanted)

    return allowed
