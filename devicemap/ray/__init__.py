"""Ray Data datasets, mapped on the hosts of a Ray cluster; needs the extra `ray`."""

from devicemap.ray.datasets import map_batches, reduce
from devicemap.ray.recorder import Recorder

__all__ = ["Recorder", "map_batches", "reduce"]
