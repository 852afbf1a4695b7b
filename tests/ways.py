"""What bad calls are crossed with: the ways in which rows travel, each as options of a map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

X = tf.reshape(tf.range(12.0), [6, 2])
Options = dict[str, Any]

ONE: Options = {"devices": ["CPU:1"]}
SEVERAL: Options = {"devices": ["CPU:2", "CPU:0", "CPU:5"]}
IN_MEMORY = {"one device": ONE, "several devices": SEVERAL}
CHUNKED = {"one device, chunks": {**ONE, "batch_size": 4}, "several devices, chunks": {**SEVERAL, "batch_size": 4}}
WAYS = {**IN_MEMORY, **CHUNKED}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


class Counter:
    """A function that counts how often Python runs it, for tracing or otherwise."""

    def __init__(self, fn: Callable[..., Any] = lambda *rows: rows[0]):
        self.fn, self.count = fn, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.fn(*args)


class Items:
    """An object with items."""

    def __getitem__(self, i: int) -> float:
        return [1.0, 2.0][i]

    def __len__(self) -> int:
        return 2
