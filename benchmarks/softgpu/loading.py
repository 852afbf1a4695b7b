"""Software GPUs from Python: how they are made, how long what they do takes, and what they did."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import tensorflow as tf
from tensorflow.python.framework import load_library  # how TensorFlow loads a plug-in that is not installed

from benchmarks.simulator.building import Unavailable, build

SOURCE = Path(__file__).with_name("device.cc")
KERNELS = Path(__file__).with_name("kernels.txt")

Kind: TypeAlias = Literal["to device", "to host", "between", "within"]


@dataclass(frozen=True)
class Copy:
    """One copy. Seconds are those of a steady clock, on Linux `time.monotonic()`'s."""

    kind: Kind
    """`"between"` two devices; `"within"` one, which does not travel."""

    sender: str
    """`"GPU:0"`, or `"host"`."""

    receiver: str

    bytes: int

    tensor: str
    """The node of the graph that made it on a device; from the host the first one that read it; empty if neither is known."""

    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Runs:
    """How often a device ran kernels of a type."""

    device: str
    op: str
    count: int
    seconds: float
    """Of the device's stream: what `configure` makes of them."""


class SoftGPUs:
    """The software GPUs of this process. `start` gives them."""

    def __init__(self, control: ctypes.CDLL, count: int):
        self._control = control
        self._count = count

    def configure(
        self,
        device: int,
        *,
        kernel_seconds: float = 0.0,
        element_seconds: float = 0.0,
        bytes_per_second: float = 0.0,
        speed: float = 1.0,
    ) -> None:
        """Say how long what a device does takes, from now on. What is not given is as in a fresh one: no time.

        Args:
            device: which GPU, for all logical devices that it is cut into.
            kernel_seconds: of its stream, for each kernel.
            element_seconds: and for each element of the kernel's largest input or output.
            bytes_per_second: of copies to, from, or between GPUs; between two, the GPU with the higher number counts. 0: as
                fast as the host copies.
            speed: by which the time of kernels, and of the simulator's work, is divided.
        """
        settings = _Settings(kernel_seconds, element_seconds, bytes_per_second, speed)
        self._control.softgpu_configure(device, ctypes.byref(settings))

    def clear(self) -> None:
        """Forget what was copied and run so far."""
        self._control.softgpu_clear()

    def reset(self) -> None:
        """Make all devices take no time again, and forget what they did."""
        for device in range(self._count):
            self.configure(device)
        self.clear()

    def copies(self, *kinds: Kind) -> list[Copy]:
        """What was copied since the last `clear`, in the order in which it ended; without kinds, what travelled."""
        wanted = kinds or ("to device", "to host", "between")
        records = (_Copy * self._control.softgpu_copies(None, 0))()
        count = self._control.softgpu_copies(records, len(records))
        return [copy for record in records[:count] if (copy := record.copy()).kind in wanted]

    def runs(self, device: str | None = None) -> list[Runs]:
        """Which kernels ran since the last `clear`, on one device (`"GPU:0"`) or all."""
        records = (_Runs * self._control.softgpu_runs(None, 0))()
        count = self._control.softgpu_runs(records, len(records))
        return [runs for record in records[:count] if device in (None, (runs := record.runs()).device)]


@functools.cache
def compile_library() -> Path:
    """Compile the emulated GPUs for the installed TensorFlow, unless that was done before; it takes about half a minute.

    Raises:
        Unavailable: this machine cannot compile them; the message says why.
    """
    return build(source=SOURCE, libraries=("libtensorflow_cc.so.2",))


@functools.cache  # TensorFlow aborts if a plug-in is loaded twice
def start(count: int = 2, memory_bytes: int = 512 << 20) -> SoftGPUs:
    """Make software GPUs of this process; what was not compiled yet is, which takes about half a minute.

    Call it before anything lists or uses TensorFlow's devices, and with the same numbers if it is called again.
    `tf.config.set_logical_device_configuration` cuts them, and `tf.config.set_visible_devices` hides them, as others.

    Args:
        count: how many, 1 to 16.
        memory_bytes: of each that is not cut: what TensorFlow's allocator gets.

    Raises:
        Unavailable: they cannot be compiled or loaded here; the message says why.
        ValueError: `count` is out of its range.
    """
    if not 1 <= count <= _MOST_DEVICES:
        raise ValueError(f"count is {count!r}; expected 1 to {_MOST_DEVICES}")
    library = str(compile_library())
    try:
        control = ctypes.CDLL(library)
        control.softgpu_start.argtypes = [ctypes.c_int32, ctypes.c_uint64, ctypes.c_char_p]
        control.softgpu_configure.argtypes = [ctypes.c_int32, ctypes.POINTER(_Settings)]
        for name in ("softgpu_copies", "softgpu_runs"):
            getattr(control, name).argtypes = [ctypes.c_void_p, ctypes.c_int64]
            getattr(control, name).restype = ctypes.c_int64
        for name in ("softgpu_start", "softgpu_configure", "softgpu_clear"):
            getattr(control, name).restype = None
        control.softgpu_start(count, memory_bytes, str(KERNELS).encode())
        load_library.load_pluggable_device_library(library)
        # It puts channels first for GPUs, and the CPU has no such kernels.
        tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    except (tf.errors.OpError, OSError, AttributeError) as error:
        raise Unavailable(f"{library} does not load into TensorFlow {tf.__version__}: {error}") from error
    return SoftGPUs(control, count)


_MOST_DEVICES = 16
_NAME_LENGTH = 120


class _Settings(ctypes.Structure):
    """The layout of `Settings` in device.cc."""

    _fields_ = tuple(
        (name, ctypes.c_double) for name in ("kernel_seconds", "element_seconds", "bytes_per_second", "speed")
    )


class _Copy(ctypes.Structure):
    """The layout of `Copy` in device.cc."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("sender", ctypes.c_int32),
        ("receiver", ctypes.c_int32),
        ("bytes", ctypes.c_uint64),
        ("start", ctypes.c_double),
        ("end", ctypes.c_double),
        ("tensor", ctypes.c_char * _NAME_LENGTH),
    )

    def copy(self) -> Copy:
        times = (self.start, self.end)
        ends = (_device_name(self.sender), _device_name(self.receiver))
        return Copy(get_args(Kind)[self.kind], *ends, self.bytes, self.tensor.decode(), *times)


class _Runs(ctypes.Structure):
    """The layout of `Run` in device.cc."""

    _fields_ = (
        ("device", ctypes.c_int32),
        ("op", ctypes.c_char * _NAME_LENGTH),
        ("count", ctypes.c_int64),
        ("seconds", ctypes.c_double),
    )

    def runs(self) -> Runs:
        return Runs(_device_name(self.device), self.op.decode(), self.count, self.seconds)


def _device_name(number: int) -> Any:
    return "host" if number < 0 else f"GPU:{number}"
