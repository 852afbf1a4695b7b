"""How datasets were made."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import usable

_REMAKES = re.compile("Unbatch|FlatMap|Interleave|Window")


def holds_batches(dataset: Any) -> bool:
    """Whether the elements of a `tf.data.Dataset` are batches, by the names of the classes that it was made with.

    A spec does not tell: samples of different lengths look like batches, and batches without the last one like samples.
    """
    name = type(dataset).__name__
    if not usable() or not hasattr(dataset, "_inputs") or _REMAKES.search(name):
        return False
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    if any(shape is None or shape.rank == 0 or shape[0] is not None for shape in shapes):
        return False  # of one length, they may be sequences
    inputs = {id(each): each for each in dataset._inputs()}.values()
    return "Batch" in name or (bool(inputs) and all(map(holds_batches, inputs)))
