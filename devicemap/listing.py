"""The devices that there are, as users see them."""

from __future__ import annotations

from devicemap.devices import kind_of, logical_devices, parts_of_physical_devices
from devicemap.errors import DeviceError
from devicemap.internals.memory import allocator_bytes
from devicemap.types import Device


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
    names, host = logical_devices()
    local = {f"{host}/device:{part.kind}:{part.index}": part for part in parts_of_physical_devices()}
    bytes_of = allocator_bytes()
    devices = []
    for name in names:
        kind_here = kind_of(name)
        if wanted in (None, kind_here):
            part = local.get(name)
            memory, description = part.describe() if part else (None, f"{kind_here} of another host")
            devices.append(Device(name, kind_here, memory or bytes_of.get(name), description))
    return devices
