"""What kernels take for themselves while they run, where TensorFlow's own code tells; that of cuDNN's is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def scratch_bytes(op: Any, sizes: Sequence[int]) -> int:
    """Bytes besides those of what an op takes and gives, whose `sizes` these are, in order."""
    if op.type == "Einsum":
        return sum(size for size, copied in zip(sizes, transposed_by(op.get_attr("equation").decode())) if copied)
    if op.type == "MaxPoolGrad":  # the position of each maximum
        return sizes[1] * tf.int64.size // op.outputs[0].dtype.size
    return 0


def transposed_by(equation: str) -> list[bool]:
    """Whether each operand is copied in another order before the product is taken, and the product after it.

    Each is brought into the order of axes that both have and that stay, axes that stay, and axes that are summed over; the
    last two may be the other way round (`tensorflow/core/kernels/linalg/einsum_op_impl.h`).

    >>> transposed_by("bqhd,bkhd->bhqk"), transposed_by("ij,jk->ik"), transposed_by("ij,jk->ki")
    ([True, True, False], [False, False, False], [False, False, True])
    """
    left, _, result = equation.replace("...", "").partition("->")
    operands = left.split(",")
    order = list(dict.fromkeys("".join(operands)))
    kinds = {label: _kind(label, operands, result) for label in order}
    copied, product = [], []
    for operand in operands:
        ranks = [(kinds[label], order.index(label)) for label in operand]
        turned = [({2: 3, 3: 2}.get(kind, kind), label) for kind, label in ranks]
        copied.append(ranks != sorted(ranks) and turned != sorted(turned))
        product += [label for label in operand if kinds[label] == 2]
    product.sort(key=lambda label: (next(i for i, o in enumerate(operands) if label in o), order.index(label)))
    batch = [label for label in order if kinds[label] == 1]
    return [*copied, [*batch, *product] != list(result)]


def _kind(label: str, operands: list[str], result: str) -> int:
    """1: all operands and the result have it, 2: one and the result, 3: several, 4: one alone."""
    in_all = len(operands) > 1 and all(label in operand for operand in operands)
    if label in result:
        return 1 if in_all else 2
    return 3 if in_all else 4
