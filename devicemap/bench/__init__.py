"""`devicemap.benchmark`: eager against graph, one device against all of them."""

from devicemap.bench.measurements import BenchmarkResult
from devicemap.bench.runner import benchmark

__all__ = ["BenchmarkResult", "benchmark"]
