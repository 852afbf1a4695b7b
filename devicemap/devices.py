"""List, choose, describe and simulate devices."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from devicemap._tensorflow.runtime import allocator_bytes
from devicemap.errors import DeviceError
from devicemap.events import short_name
from devicemap.hosts import host_of

_FAILED_COPY = re.compile(r"(Dst|Src|Destination|Source) tensor is not initialized")
task_device: ContextVar[str | None] = ContextVar("task_device", default=None)
"""The device of the task of `parallel_tasks` that is running, which `devices=None` selects; `None` outside of tasks."""

_PHYSICAL = re.compile(r"/physical_device:(?P<kind>\w+):(?P<index>\d+)")


@dataclass(frozen=True)
class Device:
    """A logical device that rows can be mapped on."""

    name: str
    """Full name, for instance `/job:localhost/replica:0/task:0/device:GPU:0`; valid in `tf.device`."""

    kind: str
    """`"GPU"`, `"CPU"`, or another device type that TensorFlow lists."""

    memory: int | None
    """Bytes that TensorFlow may use on the device, `None` if there is no limit or TensorFlow does not report it."""

    description: str
    """The model of the GPU, or the part of a physical device, in words."""


def list_devices(kind: str | None = None) -> list[Device]:
    """List the logical devices of this process, also those of hosts that TensorFlow is connected to.

    Args:
        kind: `"GPU"`, `"CPU"` or another device type; `None` lists all of them.

    Returns:
        Devices in TensorFlow's order. Listing initialises TensorFlow's devices.

    Examples:
        >>> [device.kind for device in list_devices("CPU")][:1]
        ['CPU']
    """
    if kind is not None and not isinstance(kind, str):
        raise DeviceError(f'kind is {kind!r}; expected a device type such as "GPU", or None for all')
    wanted = None if kind is None else kind.upper()
    names, host = _logical_devices()
    local, bytes_of = _local_devices(host), allocator_bytes()
    devices = []
    for name in names:
        kind_here = kind_of(name)
        if wanted in (None, kind_here):
            part = local.get(name, _LocalDevice(-1, None, f"{kind_here} of another host"))
            devices.append(Device(name, kind_here, part.memory or bytes_of.get(name), part.description))
    return devices


def simulate_devices(n: int) -> None:
    """Split the CPU into `n` logical devices, to try several devices on any machine.

    The devices share the cores, so they show placement and order, not speed. TensorFlow gets at least `n + 1` inter-op
    threads, because a blocking op holds one, and a function that a Python function calls needs another one.

    Args:
        n: how many logical CPU devices, at least 1.

    Raises:
        DeviceError: TensorFlow has already initialised another number of devices, as any op or device listing does.
            Call this first, right after importing TensorFlow.

    Examples:
        >>> simulate_devices(8)
        >>> [device.description for device in list_devices("CPU")][-1]
        'part 8 of 8 of CPU'
    """
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise DeviceError(f"n is {n!r}; expected the number of devices to simulate, an int of at least 1")
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(n)])
        tf.config.threading.set_inter_op_parallelism_threads(max(n + 1, _inter_op_threads()))
    except RuntimeError as error:
        there = len(tf.config.list_logical_devices("CPU"))
        if there != n:
            raise DeviceError(
                f"simulate_devices({n}) came too late: TensorFlow has already initialised {there} CPU device(s). "
                "Call it before the first op, tensor or device listing of the process."
            ) from error


def choose_devices(devices: Any) -> tuple[str, ...]:
    """Return the full names of the logical devices of the `devices` option.

    Args:
        devices: `None`, a kind, a name, or an iterable of names, logical devices, physical devices (all their logical ones)
            and `Device`s. `None` selects the device of the running task, or else all local logical GPUs, or else all local
            logical CPUs. A kind selects devices of all hosts. The name of a host, `/job:worker/task:1`, or of a job selects
            its GPUs, or else its CPUs.

    Raises:
        DeviceError: for an unknown, repeated or missing device; the message lists the devices.
    """
    names, host = _logical_devices()
    if devices is None and (task := task_device.get()) is not None:
        return (task,)
    if devices is None:
        local = [name for name in names if name.startswith(host)]
        return tuple(_of_kind(local, "GPU") or _of_kind(local, "CPU"))
    if isinstance(devices, str) and devices.isalpha():
        chosen = _of_kind(names, devices.upper())
        if not chosen:
            raise DeviceError(f"devices={devices!r}: there is no device of this kind; {_there_is(names, devices)}")
        return tuple(chosen)
    if isinstance(devices, str) or hasattr(devices, "name") or not isinstance(devices, Iterable):
        devices = [devices]
    chosen = [name for entry in devices for name in _resolve(entry, names, host)]
    if not chosen:
        raise DeviceError(f"devices is empty; expected at least one device, or None for all; {_there_is(names)}")
    for name in chosen:
        if chosen.count(name) > 1:
            raise DeviceError(f"devices holds {name} more than once; name each device once; {_there_is(names)}")
    return tuple(chosen)


def choose_output_device(device: Any) -> str:
    """Return the full name of the logical device of the `output_device` option; raise `DeviceError` for others."""
    names, host = _logical_devices()
    chosen = _resolve(device, names, host, "output_device")
    if len(chosen) > 1:
        raise DeviceError(f"output_device is {device!r}, which has {len(chosen)} logical devices; name one of {chosen}")
    return chosen[0]


def slots_on(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices on which shards of a call may run. CPUs of this host are repeated for each further core.

    TensorFlow runs a serial function on one core, however many a CPU device has. A second shard halves its time, and
    does not slow down functions whose ops use all cores (`benchmarks/test_real_functions.py`).
    """
    here = _logical_devices()[1]
    cpus = [device for device in _of_kind(list(devices), "CPU") if host_of(device) == here]
    cores = min(os.cpu_count() or 1, _inter_op_threads())
    return (*devices, *cpus * (cores // max(1, len(cpus)) - 1))


def python_calls_at_once() -> int:
    """Return how many Python functions may run in graphs at the same time.

    Each Python function holds one of TensorFlow's inter-op threads. A `tf.function` that one of them calls, as Keras's
    `predict` does, needs another thread. Without a free thread, all would wait forever (tests/laws/test_python_calls.py).
    """
    return max(1, _inter_op_threads() - 1)


def _inter_op_threads() -> int:
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1  # 0: one per core


def why_no_gpu() -> str:
    """Return the reason why TensorFlow has no GPU, as far as it can be known."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    build = tf.sysconfig.get_build_info()
    if not tf.test.is_built_with_gpu_support():
        return (
            f"this build of TensorFlow {tf.__version__} is for CPUs only; for NVIDIA GPUs, install tensorflow[and-cuda] "
            "instead"
        )
    if tf.config.list_physical_devices("GPU"):
        return "this process has hidden them with tf.config.set_visible_devices"
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all of them"
    if not Path("/proc/driver/nvidia/version").exists() and not shutil.which("nvidia-smi"):
        return f"TensorFlow {tf.__version__} could use one, but no NVIDIA driver was found on this machine"
    return (
        f"there is a driver, but TensorFlow {tf.__version__}, built for CUDA {build.get('cuda_version', '?')} and cuDNN "
        f"{build.get('cudnn_version', '?')}, found no GPU that it can use. TF_CPP_MIN_LOG_LEVEL=0 devicemap devices shows "
        "TensorFlow's reasons: often a library is missing, which tensorflow[and-cuda] installs"
    )


def kind_of(name: str) -> str:
    """Return the kind in a device's full name.

    >>> kind_of("/job:localhost/replica:0/task:0/device:GPU:1")
    'GPU'
    """
    return name.rpartition("device:")[2].partition(":")[0]


def _resolve(entry: Any, names: list[str], host: str, option: str = "devices") -> list[str]:
    """Return the full names of the devices that one entry of an option selects."""
    given = entry if isinstance(entry, str) else getattr(entry, "name", None)
    if not isinstance(given, str):
        raise DeviceError(
            f"{option} has {entry!r} of type {type(entry).__name__}; expected names such as 'GPU:0', "
            f"or logical or physical devices of tf.config; {_there_is(names)}"
        )
    if physical := _PHYSICAL.fullmatch(given):
        kind, index, local = physical["kind"].upper(), int(physical["index"]), _local_devices(host)
        found = [name for name in _of_kind(names, kind) if name in local and local[name].physical_index == index]
    else:
        found = _matching(given, names, host)
    if not found:
        advice = ""
        if option == "devices" and given.isalpha():
            advice = f"; pass a kind by itself, as in devices={given!r}"
        elif option == "devices" and "," in given:
            advice = f"; pass a list of names, devices={[name.strip() for name in given.split(',')]}"
        raise DeviceError(f"{option} has {given!r}, which is not a device here{advice}; {_there_is(names, given)}")
    return found


def _matching(given: str, names: list[str], host: str) -> list[str]:
    """Return the full names that match a short or full name of a device, or the name of a host or job."""
    try:
        spec = tf.DeviceSpec.from_string(given)
    except ValueError:
        return []
    kind = spec.device_type and spec.device_type.upper()
    wanted = tf.DeviceSpec(spec.job, spec.replica, spec.task, kind, spec.device_index)
    full = {name: tf.DeviceSpec.from_string(name) for name in names}
    found = [name for name in names if full[name].make_merged_spec(wanted) == full[name]]
    if kind is None and spec.job is not None:
        hosts = {host_of(name): [each for each in found if host_of(each) == host_of(name)] for name in found}
        return [name for there in hosts.values() for name in _of_kind(there, "GPU") or _of_kind(there, "CPU")]
    if kind is None or spec.device_index is None:
        return []
    # If TensorFlow is connected to other hosts, a short name means the device of this host.
    return found if len(found) < 2 else [name for name in found if name.startswith(host)]


def _of_kind(names: list[str], kind: str) -> list[str]:
    return [name for name in names if kind_of(name) == kind]


def gpu_indices(names: Sequence[str]) -> dict[str, int]:
    """Return the index of the physical GPU of each local GPU among these full names."""
    local = _local_devices(_logical_devices()[1])
    return {name: local[name].physical_index for name in names if kind_of(name) == "GPU" and name in local}


def _logical_devices() -> tuple[list[str], str]:
    """Return the full names of all logical devices, and the name of this host.

    TensorFlow lists the devices of this host as `/device:CPU:0` until it is connected to others. An eager tensor has
    the full name.
    """
    with tf.init_scope(), tf.device(None), tf.device("/device:CPU:0"):
        host = tf.constant(0).device.partition("/device:")[0]
    names = [device.name for device in tf.config.list_logical_devices()]
    return [host + name if name.startswith("/device:") else name for name in names], host


def _there_is(names: list[str], given: str = "") -> str:
    """List the devices, and say why there is no GPU if `given` requests one."""
    why = f". No GPU: {why_no_gpu()}" if "GPU" in given.upper() and not _of_kind(names, "GPU") else ""
    return "there is " + ", ".join(map(short_name, names)) + why


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device had no memory left.

    TensorFlow raises `InternalError` for a copy to or from a tensor that could not be allocated. Only the message shows it.

    >>> is_out_of_memory(tf.errors.InternalError(None, None, "Dst tensor is not initialized."))
    True
    """
    if isinstance(error, tf.errors.InternalError):
        return bool(_FAILED_COPY.search(str(error)))
    return isinstance(error, tf.errors.ResourceExhaustedError)


class _LocalDevice(NamedTuple):
    """A logical device of this host."""

    physical_index: int
    """The index of the physical device."""

    memory: int | None
    """The configured memory limit in bytes."""

    description: str


def _local_devices(host: str) -> dict[str, _LocalDevice]:
    """Return the logical devices of this host by full name: parts of visible physical devices, in this order."""
    found: dict[str, _LocalDevice] = {}
    count: Counter[str] = Counter()
    for physical in tf.config.get_visible_devices():
        kind = physical.device_type
        model = tf.config.experimental.get_device_details(physical).get("device_name", kind)
        parts = list(tf.config.get_logical_device_configuration(physical) or [None])
        for number, part in enumerate(parts, 1):
            limit = getattr(part, "memory_limit", None)
            found[f"{host}/device:{kind}:{count[kind]}"] = _LocalDevice(
                int(physical.name.rpartition(":")[2]),
                None if limit is None else int(limit) * 2**20,  # TensorFlow's limits are in MiB
                model if len(parts) == 1 else f"part {number} of {len(parts)} of {model}",
            )
            count[kind] += 1
    return found
