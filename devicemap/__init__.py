"""Map an expensive TensorFlow function over data on every device of a machine, in parallel and in order."""

from devicemap.benchmarking import benchmark
from devicemap.devices import list_devices, simulate_devices
from devicemap.journal.results import open_results
from devicemap.mapping import DeviceMap, parallel_map

__all__ = ["DeviceMap", "benchmark", "list_devices", "open_results", "parallel_map", "simulate_devices"]
__version__ = "0.1.0"
