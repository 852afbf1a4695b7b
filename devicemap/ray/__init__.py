"""Maps over Ray Data datasets on the hosts of a Ray cluster. They need the extra `ray`."""

from devicemap.ray.datasets import map_batches, reduce

__all__ = ["map_batches", "reduce"]
