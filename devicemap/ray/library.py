"""Ray itself, which is optional."""

from __future__ import annotations

from typing import Any

from devicemap.errors import DeviceMapError


def library() -> Any:
    """The module `ray`, with `ray.data`.

    Raises:
        DeviceMapError: Ray Data is not installed.
    """
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise DeviceMapError("devicemap.ray needs Ray Data, which is not installed: pip install 'ray[data]'") from error
    return ray
