"""The memory of devices, and the devices of ops."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, with_fallback

_context = Private("tensorflow.python.eager.context", "context")
_listing = Private(
    "tensorflow.python.pywrap_tfe",
    *("TFE_ContextListDevices", "TF_DeviceListCount", "TF_DeviceListName", "TF_DeviceListType", "TF_DeleteDeviceList"),
)
_sizes = Private("tensorflow.python.client.pywrap_tf_session", "TF_DeviceListMemoryBytes")
_ops = Private(
    "tensorflow.python.framework.ops",
    *("Graph._device_function_stack", "Operation._update_input", "get_gradient_function"),
)

_devices: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""The devices of each graph that `colocate_with_inputs` has changed."""


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


@with_fallback(nothing, _ops)
def colocate_with_inputs(devices: Iterable[str]) -> None:
    """Place later ops of the graph being built on the device of their first input that is on one of `devices`.

    This includes the graphs around it. Scalars do not count. An optimizer then updates variables and slots on their devices,
    instead of on the first GPU. A `tf.device` scope takes precedence, because the device function is the outermost scope of
    its graph. A scope cannot do this, because the user's code calls the optimizer after the pipeline has returned.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "building_function", False):
        if graph not in _devices:
            _devices[graph] = set()
            stack = graph._device_function_stack._stack
            with graph.device(partial(_colocated_device, _devices[graph])):
                scope = stack[-1]
            stack.insert(0, scope)
        _devices[graph].update(devices)
        graph = graph.outer_graph


def _colocated_device(devices: set[str], op: Any) -> str:
    for i, tensor in enumerate(op.inputs):
        if _is_group(tensor.op) and len({_home_of(each) for each in tensor.op.inputs} & devices) > 1:
            # Keras's optimizers pass all gradients through one op, which would copy them to one device.
            op._update_input(i, tensor.op.inputs[tensor.value_index])
    return str(op.device) or home_of_inputs(op, devices)


def home_of_inputs(op: Any, devices: Container[str]) -> str:
    """Return the device of the first input of an op that is on one of `devices`, or an empty string. Scalars do not count."""
    homes = (_home_of(tensor) for tensor in op.inputs if tensor.shape.rank != 0)
    return next((home for home in homes if home in devices), "")


def _is_group(op: Any) -> bool:
    """Whether an op only passes tensors on. Of `tf.custom_gradient`s, only that of an optimizer's `all_reduce` is allowed."""
    if op.type != "IdentityN" or "_gradient_op_type" not in op.node_def.attr:
        return bool(op.type == "IdentityN")
    held, left = set(), [_ops.get_gradient_function(op)]
    while left:  # search the functions that `tf.custom_gradient` wraps
        function = inspect.unwrap(left.pop())
        if inspect.isfunction(function) and function not in held:
            held.add(function)
            left += inspect.getclosurevars(function).nonlocals.values()
    return any(function.__module__ == tf.distribute.ReplicaContext.__module__ for function in held)


def _home_of(tensor: Any) -> str:
    if tensor.device or tensor.op.type != "ReadVariableOp":
        return str(tensor.device)
    handle, graph = tensor.op.inputs[0], tensor.graph
    while handle is not None and not hasattr(handle, "numpy"):  # captured, perhaps by an outer function
        handle = next((outside for outside, inside in graph.captures if inside is handle), None)
        graph = graph.outer_graph
    return "" if handle is None else str(handle.device)
