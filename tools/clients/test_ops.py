"""TensorFlow's ops, in functions of a row: vectorised where they can be, and row by row."""

from __future__ import annotations

from typing import Any

import pytest
from clients.agreement import Client, check_gradients, check_results
from clients.known import known
from clients.ops import arrays, control, dtypes, images, linalg, maths, nets, signals, strings, structures

AREAS = (maths, linalg, signals, images, nets, strings, structures, control, arrays, dtypes)
OPS = {f"{area.__name__.rpartition('.')[2]}: {name}": Client(*op) for area in AREAS for name, op in area.OPS.items()}


@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize("name", OPS)
def test_op(name: str, vectorize: Any, request: pytest.FixtureRequest) -> None:
    """Results, and gradients where there are any: None in the one and zeros in the other count as equal there."""
    known(request)
    check_results(OPS[name], vectorize=vectorize)
    if OPS[name].differentiable:
        check_gradients(OPS[name], vectorize=vectorize)
