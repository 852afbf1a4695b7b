"""What is known to fail or to differ, and why: a test that no longer does so fails until it is taken out of here."""

from __future__ import annotations

import pytest

_ADJOINT = "nor has tf.map_fn in a tf.function a gradient of the solver: its adjoint makes what the loop captures again"
KNOWN = {
    "test_gradients[solver: Dormand-Prince-auto]": _ADJOINT,
    "test_gradients[solver: Dormand-Prince-False]": _ADJOINT,
}
"""The name of a test, without its file -> why it fails."""


def known(request: pytest.FixtureRequest) -> None:
    """Marks the test as one that has to fail, where it is known to."""
    if reason := KNOWN.get(request.node.name):
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
