"""`devicemap.benchmark`: eager against graph, one device against all of them."""

from devicemap.benchmarking.measurements import BenchmarkResult
from devicemap.benchmarking.running import benchmark

__all__ = ["BenchmarkResult", "benchmark"]
