"""The memory of devices."""

from __future__ import annotations

from typing import Any

from devicemap._tensorflow import Private, with_fallback

_context = Private("tensorflow.python.eager.context", "context")
_listing = Private(
    "tensorflow.python.pywrap_tfe",
    *("TFE_ContextListDevices", "TF_DeviceListCount", "TF_DeviceListName", "TF_DeviceListType", "TF_DeleteDeviceList"),
)
_sizes = Private("tensorflow.python.client.pywrap_tf_session", "TF_DeviceListMemoryBytes")


@with_fallback(dict, _context, _listing, _sizes)
def allocator_bytes() -> dict[str, int]:
    """Return the bytes that TensorFlow's allocator may use on each device that is not a CPU, by full name.

    The public API has the configured limit of a logical device, but not the memory of a whole GPU.
    """
    context: Any = _context.context()
    context.ensure_initialized()
    devices = _listing.TFE_ContextListDevices(context._handle)
    try:
        return {
            _listing.TF_DeviceListName(devices, i): _sizes.TF_DeviceListMemoryBytes(devices, i)
            for i in range(_listing.TF_DeviceListCount(devices))
            if _listing.TF_DeviceListType(devices, i) != "CPU"
        }
    finally:
        _listing.TF_DeleteDeviceList(devices)
