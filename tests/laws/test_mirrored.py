"""Law 10 for programs that fail or compute something else under `MirroredStrategy` (docs/reference/mirroredstrategy.md)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from mirrored import FIXED, PROGRAMS, REFUSED

import devicemap

DEVICES = ["CPU:1", "CPU:0"]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "mirroredstrategy.md"
DIFFERENT = "accumulating_step", "strings", "ragged", "memory_bank", "largest_output", "train_on_batch"
"""Programs in `make check`. The others are trained there as cases of `trainings.py`, or are like one of these."""

OTHERS = sorted({*PROGRAMS, *FIXED} - {*DIFFERENT})


@pytest.mark.parametrize("name", [*DIFFERENT, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_computes_what_one_device_does(name: str) -> None:
    case = (PROGRAMS | FIXED)[name]
    got = case.trained(devicemap.parallelize(case.made(), DEVICES))
    tf.nest.map_structure(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, case.wanted)


def test_the_page_lists_every_program() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(named) == sorted(PROGRAMS | REFUSED)
