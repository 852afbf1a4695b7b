"""How much memory devices have, as TensorFlow knows it."""

from __future__ import annotations

import tensorflow as tf

from devicemap.internals import Private, with_fallback

_context = Private("tensorflow.python.eager.context", "context", "Context._handle")
_listing = Private(
    "tensorflow.python.client.pywrap_tf_session",
    *("TF_DeleteDeviceList", "TF_DeviceListCount", "TF_DeviceListMemoryBytes", "TF_DeviceListName"),
)
_tfe = Private("tensorflow.python.pywrap_tfe", "TFE_ContextListDevices")


def _untold() -> dict[str, int]:
    return {}


@with_fallback(_untold, _context, _listing, _tfe)
def memory_limits() -> dict[str, int]:
    """Full name of each logical device -> the bytes that TensorFlow's allocator may take on it; of CPUs, they mean nothing.

    A session would list them, too, and make all devices again. Publicly, none are known.
    """
    tf.config.list_logical_devices()  # the context has its devices after this
    devices = _tfe.TFE_ContextListDevices(_context.context()._handle)
    try:
        listed = range(_listing.TF_DeviceListCount(devices))
        return {_listing.TF_DeviceListName(devices, i): _listing.TF_DeviceListMemoryBytes(devices, i) for i in listed}
    finally:
        _listing.TF_DeleteDeviceList(devices)
