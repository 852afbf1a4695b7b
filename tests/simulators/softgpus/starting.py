"""How the files here get their GPUs."""

from __future__ import annotations

import pytest

from benchmarks import softgpu


def start(count: int, memory_bytes: int) -> softgpu.SoftGPUs:
    """Those of this process; where they cannot be had, what needs them is skipped, and says why."""
    try:
        return softgpu.start(count, memory_bytes)
    except softgpu.Unavailable as reason:
        pytest.skip(str(reason), allow_module_level=True)
