"""Ray Data datasets, mapped on the hosts of a Ray cluster; needs the extra `ray`."""

from devicemap.ray.datasets import map_batches, reduce

__all__ = ["map_batches", "reduce"]
