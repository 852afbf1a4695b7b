"""Map an expensive TensorFlow function over data on every device of a machine, in parallel and in order."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from devicemap.api import DeviceMap, parallel_map, parallel_reduce
    from devicemap.bench.runner import benchmark
    from devicemap.cluster import connect
    from devicemap.compile.aggregates import Reducer
    from devicemap.devices import list_devices, simulate_devices
    from devicemap.pipelines.pipeline import Pipeline
    from devicemap.pipelines.split import split
    from devicemap.store.results import open_results
    from devicemap.tasks import parallel_tasks
    from devicemap.training.models import parallelize
    from devicemap.training.variables import spread_variables

__all__ = [
    "DeviceMap",
    "Pipeline",
    "Reducer",
    "benchmark",
    "connect",
    "list_devices",
    "open_results",
    "parallel_map",
    "parallel_reduce",
    "parallel_tasks",
    "parallelize",
    "simulate_devices",
    "split",
    "spread_variables",
]
__version__ = "0.2.0"

_HOMES = {
    "DeviceMap": "devicemap.api",
    "Pipeline": "devicemap.pipelines.pipeline",
    "Reducer": "devicemap.compile.aggregates",
    "benchmark": "devicemap.bench.runner",
    "connect": "devicemap.cluster",
    "list_devices": "devicemap.devices",
    "open_results": "devicemap.store.results",
    "parallel_map": "devicemap.api",
    "parallel_reduce": "devicemap.api",
    "parallel_tasks": "devicemap.tasks",
    "parallelize": "devicemap.training.models",
    "simulate_devices": "devicemap.devices",
    "split": "devicemap.pipelines.split",
    "spread_variables": "devicemap.training.variables",
}
"""Where the public names are. They are imported when they are first used, so that `devicemap --help` and completion in a
shell need not wait seconds for TensorFlow."""


def __getattr__(name: str) -> typing.Any:
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
    if not name.startswith("_"):  # a module of the package, as `devicemap.errors` after `import devicemap`
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__version__", "errors", "types"])
