"""GPUs in software, for what logical CPUs do not show: memory apart, copies, ops without a kernel. See README.md."""

from benchmarks.simulator.building import Unavailable

from .loading import Copy, Runs, SoftGPUs, start, total_bytes

__all__ = ["Copy", "Runs", "SoftGPUs", "Unavailable", "start", "total_bytes"]
