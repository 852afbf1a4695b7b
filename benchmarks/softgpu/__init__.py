"""GPUs in software, for what logical CPUs do not show: memory apart, copies, ops without a kernel. See README.md."""

from benchmarks.simulator.building import Unavailable

from .loading import Copy, Runs, SoftGPUs, compile_library, start

__all__ = ["Copy", "Runs", "SoftGPUs", "Unavailable", "compile_library", "start"]
