"""What fits into memory, by numbers alone; `softgpus/budgets.py` holds what is told against TensorFlow's allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import devicemap
from devicemap.compile.cost.scratch import transposed_by
from devicemap.errors import OptionError
from devicemap.tell.plan.memory import Memory, largest_batch


def memory(held: int = 0, least: int = 0, fixed: int = 0, per_row: float = 1.0, limit: int | None = 1000) -> Memory:
    return Memory("/device:GPU:0", held, 0, 0, least, fixed, per_row, limit)


@given(*[st.integers(0, 500)] * 3, st.floats(0.5, 50), st.integers(1, 10**5))
def test_the_largest_batch_is_the_last_that_fits(held: int, least: int, fixed: int, per_row: float, limit: int) -> None:
    each = memory(held, least, fixed, per_row)
    rows = each.most_rows(limit)
    peaks = [each.peak_bytes(count) for count in (rows or 0, (rows or 0) + 2)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0] <= limit + 1 or not rows
    assert peaks[1] > limit


@pytest.mark.parametrize(
    ("devices", "memory_bytes", "margin", "rows"),
    [
        ([memory()], None, 0.1, 900),
        ([memory(), memory(held=500)], None, 0.0, 500),
        ([memory()], 100, 0.0, 100),
        ([memory(least=2000)], None, 0.0, 0),
        ([memory(limit=None)], None, 0.0, None),
        ([memory(), memory(per_row=0.0)], None, 0.0, 1000),
        ([memory(), Memory("/device:GPU:1", 0, 0, 0, None, None, None, 9)], None, 0.0, None),
    ],
)
def test_the_tightest_device_decides(devices: Any, memory_bytes: int | None, margin: float, rows: int | None) -> None:
    assert largest_batch(devices, memory_bytes, margin) == rows


@pytest.mark.parametrize("options", [{"margin": 1.0}, {"margin": -0.1}, {"memory_bytes": 0}, {"memory_bytes": "16GB"}])
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    plan = devicemap.DeviceMap(tf.sin, devices=["CPU:0"]).explain(tf.TensorSpec([None, 8]))
    with pytest.raises(OptionError, match=next(iter(options))):
        plan.largest_batch(**options)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_memory_is_drawn(tmp_path: Path, suffix: str) -> None:
    plan = devicemap.DeviceMap(tf.sin, devices=["CPU:0"]).explain(tf.TensorSpec([None, 8]))
    plan.plot_memory(tmp_path / f"memory.{suffix}")
    assert (tmp_path / f"memory.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("equation", "copied"),
    [
        ("ij,jk->ik", [False, False, False]),
        ("ij,kj->ik", [False, False, False]),
        ("ij,jk->ki", [False, False, True]),
        ("bqhd,bkhd->bhqk", [True, True, False]),
        ("bqhd,bkhd->bqhk", [True, True, True]),
    ],
)
def test_einsum_transposes(equation: str, copied: list[bool]) -> None:
    assert transposed_by(equation) == copied


def test_of_a_model_a_step_counts_gradients_and_slots() -> None:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64, use_bias=False)])
    model.compile("adam", "mse", jit_compile=False)
    devicemap.parallelize(model, ["CPU:0", "CPU:1"])
    home, other = model.explain(tf.TensorSpec([None, 64])).memory
    size = 64 * 64 * 4
    assert home.variable_bytes == size
    assert home.slot_bytes >= 2 * size
    assert home.gradient_bytes >= size
    assert other.slot_bytes == 0
    assert other.bytes_per_row > 0
    with pytest.raises(OptionError, match="targets"):
        model.explain(tf.TensorSpec([None, 64]), tf.TensorSpec([None, 3, 5]))
