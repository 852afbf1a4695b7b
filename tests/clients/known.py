"""What is known to fail or to differ, and why: a test that no longer does so fails until it is taken out of here."""

from __future__ import annotations

import pytest

KNOWN: dict[str, str] = {}
"""The name of a test, without its file -> why it fails."""


def known(request: pytest.FixtureRequest) -> None:
    """Marks the test as one that has to fail, where it is known to."""
    if request.node.name in KNOWN:
        request.applymarker(pytest.mark.xfail(strict=True, reason=KNOWN[request.node.name]))
