"""The values that the modules hand to each other: frozen, and free of tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A logical device that rows can be mapped on."""

    name: str
    """Full name, for instance `/job:localhost/replica:0/task:0/device:GPU:0`; valid in `tf.device`."""

    kind: str
    """`"GPU"`, `"CPU"`, or another device type that TensorFlow lists."""

    memory: int | None
    """Bytes that TensorFlow may use on it, `None` where it has no limit of its own or does not tell."""

    description: str
    """What it is, in words: the model of the GPU, or which part of which physical device."""


@dataclass(frozen=True)
class Shard:
    """Neighbouring rows that one device computes in one call."""

    device: str
    """Full name of the device."""

    start: int
    """Global index of the first row."""

    stop: int
    """Global index after the last row."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        rows = f"row {self.start}" if len(self) == 1 else f"rows {self.start} to {self.stop - 1}"
        return f"{rows} on {self.device.rpartition('device:')[2]}"
