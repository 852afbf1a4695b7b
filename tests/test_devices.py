"""Listing, choosing and simulating devices; what needs another state of TensorFlow runs in a fresh process."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

import devicemap
from devicemap.devices import choose_devices, kind_of, slots_on
from devicemap.errors import DeviceError

HOST = "/job:localhost/replica:0/task:0"
CPUS = tuple(f"{HOST}/device:CPU:{i}" for i in range(8))
X = tf.range(7.0)


def test_list_devices() -> None:
    assert tuple(device.name for device in devicemap.list_devices("CPU")) == CPUS
    assert devicemap.list_devices("cpu") == devicemap.list_devices("CPU")
    assert {device.kind for device in devicemap.list_devices()} == {
        d.device_type for d in tf.config.list_logical_devices()
    }
    assert devicemap.list_devices("no such kind") == []
    second = devicemap.list_devices("CPU")[1]
    assert (second.kind, second.memory, second.description) == ("CPU", None, "part 2 of 8 of CPU")


def test_listed_names_are_valid_in_tf_device() -> None:
    for device in devicemap.list_devices():
        with tf.device(device.name):
            assert tf.identity(X).device == device.name


def test_list_devices_of_something_that_is_no_kind() -> None:
    with pytest.raises(DeviceError, match=r'^kind is 3; expected a device type such as "GPU", or None for all$'):
        devicemap.list_devices(3)  # type: ignore[arg-type]


LOGICAL = tf.config.list_logical_devices("CPU")
PHYSICAL = tf.config.list_physical_devices("CPU")
LISTED = devicemap.list_devices("CPU")
FORMS: list[tuple[str, Any, tuple[int, ...]]] = [
    ("a kind", "CPU", tuple(range(8))),
    ("a kind in small letters", "cpu", tuple(range(8))),
    ("a name", "CPU:3", (3,)),
    ("a name in small letters", "cpu:3", (3,)),
    ("with a slash", "/CPU:3", (3,)),
    ("with device", "/device:CPU:3", (3,)),
    ("a full name", CPUS[3], (3,)),
    ("with a job", "/job:localhost/device:CPU:3", (3,)),
    ("with a job and a task", "/job:localhost/task:0/cpu:3", (3,)),
    ("a list", ["CPU:5", "/CPU:1", "/device:CPU:2"], (5, 1, 2)),
    ("a tuple", ("CPU:5", CPUS[1]), (5, 1)),
    ("an array", np.array(["CPU:5", "CPU:1"]), (5, 1)),
    ("a generator", (f"CPU:{i}" for i in (4, 2)), (4, 2)),
    ("a set", {"CPU:6"}, (6,)),
    ("logical devices", [LOGICAL[5], LOGICAL[0]], (5, 0)),
    ("physical devices", PHYSICAL, tuple(range(8))),
    ("a listed device", LISTED[4], (4,)),
    ("listed devices", LISTED[6:4:-1], (6, 5)),
    ("one logical device", LOGICAL[3], (3,)),
    ("of several forms", [LISTED[6], "CPU:0", LOGICAL[3]], (6, 0, 3)),
]


@pytest.mark.parametrize(("devices", "chosen"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
def test_forms_of_devices(devices: Any, chosen: tuple[int, ...]) -> None:
    assert choose_devices(devices) == tuple(CPUS[i] for i in chosen)


def test_devices_are_chosen_inside_a_function_and_another_scope_too() -> None:
    @tf.function
    def function(x: Any) -> Any:
        return devicemap.parallel_map(lambda row: row + 1, x, devices=["CPU:1", "CPU:4"])

    with tf.device("CPU:7"):
        np.testing.assert_array_equal(function(X), X + 1)


UNKNOWN: list[tuple[Any, str]] = [
    ("CPU:8", "^devices has 'CPU:8', which is not a device here; there is CPU:0, CPU:1, CPU:2, "),
    (f"{HOST[:-1]}1/device:CPU:0", "task:1/device:CPU:0', which is not a device here; "),
    ("", "^devices has '', which is not a device here; there is CPU:0, "),
    (
        tf.config.PhysicalDevice("/physical_device:CPU:7", "CPU")[:1],
        "'/physical_device:CPU:7', which is not a device here",
    ),
    ("NPU", "^devices='NPU': there is no device of this kind; there is CPU:0, "),
    ([], "^devices is empty; expected at least one device, or None for all; there is CPU:0, "),
    pytest.param(iter(()), "^devices is empty; ", id="an iterator of none"),
    (0, "^devices has 0 of type int; expected names such as 'GPU:0', or logical or physical devices of tf.config; "),
    ([["CPU:0"]], r"^devices has \['CPU:0'\] of type list; expected names"),
    (
        ["CPU:2", "CPU:0", "/CPU:2"],
        "^devices holds /job:localhost.*CPU:2 more than once; name each device once; there is CPU:0",
    ),
    ([*PHYSICAL, "CPU:2"], "CPU:2 more than once; name each device once"),
    (["CPU:1", "gpu"], "^devices has 'gpu', which is not a device here; pass a kind by itself, as in devices='gpu'; "),
]


@pytest.mark.parametrize(("devices", "message"), UNKNOWN, ids=lambda value: str(value)[:40])
def test_devices_that_cannot_be(devices: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        choose_devices(devices)


NO_GPU = f"GPU:{len(tf.config.list_logical_devices('GPU'))}"  # GPU:0 on a machine without
NO_OUTPUT: list[tuple[Any, str]] = [
    (None, "^output_device has None of type NoneType; expected names such as 'GPU:0', or .*; there is CPU:0, "),
    (
        NO_GPU,
        f"^output_device has '{NO_GPU}', which is not a device here; there is CPU:0, .*CPU:7(. No GPU: .*|, GPU.*)$",
    ),
    (
        PHYSICAL[0],
        rf"^output_device is PhysicalDevice\(.*\), which has 8 logical devices; name one of \['{CPUS[0]}', ",
    ),
]


@pytest.mark.parametrize(("output_device", "message"), NO_OUTPUT, ids=lambda value: str(value)[:40])
def test_output_devices_that_cannot_be(output_device: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        devicemap.DeviceMap(tf.identity, output_device=output_device)


@pytest.mark.parametrize("output_device", ["CPU:6", "/device:CPU:6", CPUS[6], LOGICAL[6], LISTED[6]], ids=str)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_results_are_gathered_on_the_output_device(output_device: Any, batch_size: int | None) -> None:
    options = {"devices": ["CPU:1", "CPU:2"], "batch_size": batch_size, "output_device": output_device}
    y = devicemap.parallel_map(lambda row: row + 1, X, **options)
    np.testing.assert_array_equal(y, X + 1)
    assert y.backing_device == CPUS[6]  # y.device is where the op ran that called the graph


def test_places_are_the_devices_and_further_cores_of_cpus() -> None:
    gpus = (f"{HOST}/device:GPU:0", f"{HOST}/device:GPU:1")
    assert slots_on(gpus) == gpus
    for devices in (CPUS, CPUS[2:3], (*gpus, CPUS[0])):
        places = slots_on(devices)
        assert places[: len(devices)] == devices
        assert {kind_of(place) for place in places[len(devices) :]} <= {"CPU"}
        assert set(places) == set(devices)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As TensorFlow tells of a machine with three GPUs: the first cut into two, the third hidden."""
    made = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(3)]
    cpu = tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=mebibytes) for mebibytes in (2048, 4096)]
    logical = [tf.config.LogicalDevice(f"/device:{name}", name[:3]) for name in ("CPU:0", "GPU:0", "GPU:1", "GPU:2")]
    answers = {
        "get_visible_devices": lambda: [cpu, *made[:2]],
        "get_logical_device_configuration": lambda device: halves if device == made[0] else None,
        "list_logical_devices": lambda kind=None: [d for d in logical if kind in (None, d.device_type)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(tf.config, name, answer)
    details = lambda device: {"device_name": "H200"} if device.device_type == "GPU" else {}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details)
    return made


def test_every_gpu_is_the_default(gpus: list[Any]) -> None:
    wanted = tuple(f"{HOST}/device:GPU:{i}" for i in range(3))
    assert choose_devices(None) == choose_devices("GPU") == wanted
    assert choose_devices(gpus[:2]) == wanted


def test_a_physical_device_stands_for_its_logical_ones(gpus: list[Any]) -> None:
    assert choose_devices([gpus[1], gpus[0]]) == tuple(f"{HOST}/device:GPU:{i}" for i in (2, 0, 1))
    with pytest.raises(DeviceError, match="GPU:1 more than once"):
        choose_devices([gpus[0], "GPU:1"])
    with pytest.raises(
        DeviceError, match="'/physical_device:GPU:2', which is not a device here; there is CPU:0, GPU:0, "
    ):
        choose_devices([gpus[2]])


def test_memory_and_description(gpus: list[Any]) -> None:
    assert [(device.memory, device.description) for device in devicemap.list_devices()] == [
        (None, "CPU"),
        (2 * 2**30, "part 1 of 2 of H200"),
        (4 * 2**30, "part 2 of 2 of H200"),
        (None, "H200"),
    ]


def test_no_gpu() -> None:
    if not tf.config.list_physical_devices("GPU"):
        assert choose_devices(None) == CPUS


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "2", None], ids=str)
def test_a_number_that_cannot_be_simulated(n: Any) -> None:
    message = f"^n is {re.escape(repr(n))}; expected the number of devices to simulate, an int of at least 1$"
    with pytest.raises(DeviceError, match=message):
        devicemap.simulate_devices(n)


def test_simulating_too_late() -> None:
    message = r"^simulate_devices\(3\) came too late: TensorFlow has already initialised 8 CPU device\(s\)\. "
    with pytest.raises(DeviceError, match=message):
        devicemap.simulate_devices(3)


def test_simulating_in_a_fresh_process() -> None:
    lines = processes.run("""
        import tensorflow as tf, devicemap
        devicemap.simulate_devices(2)
        devicemap.simulate_devices(5)
        print(tf.config.threading.get_inter_op_parallelism_threads())
        tf.config.threading.set_inter_op_parallelism_threads(9)
        devicemap.simulate_devices(3)
        print(tf.config.threading.get_inter_op_parallelism_threads())
        print(len(devicemap.list_devices("CPU")), len(tf.config.list_logical_devices("CPU")))
        print(devicemap.parallel_map(lambda row: row * 2, [1, 2, 3, 4], devices="CPU").numpy().tolist())
    """)
    assert lines == [str(max(6, os.cpu_count() or 1)), "9", "3 3", "[2, 4, 6, 8]"]


def test_importing_changes_nothing() -> None:
    """Only an uninitialised TensorFlow takes another number of devices."""
    lines = processes.run("""
        import logging, os, random, signal, sys, threading, warnings
        import numpy as np, tensorflow as tf

        def state():
            loggers = [logging.getLogger(), *(logging.getLogger(n) for n in ("tensorflow", "absl", "devicemap"))]
            return {
                "environment": dict(os.environ),
                "loggers": [(l.level, list(l.handlers), list(l.filters), l.propagate, l.disabled) for l in loggers],
                "threads": threading.enumerate(),
                "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
                "hooks": [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook],
                "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
                "warnings": list(warnings.filters),
                "numpy": [np.geterr(), np.random.get_state()[1].tolist(), np.get_printoptions()],
                "random": random.getstate(),
                "tensorflow": [
                    tf.config.threading.get_inter_op_parallelism_threads(),
                    tf.config.threading.get_intra_op_parallelism_threads(),
                    tf.config.functions_run_eagerly(),
                    tf.config.get_visible_devices(),
                    tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]),
                    tf.config.get_soft_device_placement(),
                ],
                "directory": (os.getcwd(), list(sys.path)),
            }

        before = state()
        import devicemap
        after = state()
        print([key for key in before if before[key] != after[key]])
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
        )
        print(len(tf.config.list_logical_devices("CPU")))
    """)
    assert lines == ["[]", "4"]


def test_devices_of_another_host() -> None:
    lines = processes.run("""
        import tensorflow as tf, devicemap
        server = tf.distribute.Server.create_local_server(tf.compat.v1.ConfigProto(device_count={"CPU": 2}))
        tf.config.experimental_connect_to_host(server.target, job_name="worker")
        for device in devicemap.list_devices():
            print(device.name, device.description)
        full_name = "/job:worker/replica:0/task:0/device:CPU:0"
        for devices in ([full_name], ["/job:worker/task:0/CPU:1", "CPU:0"], "CPU:0", None, "CPU"):
            for batch_size in (None, 2) if type(devices) is list else (None,):
                mapper = devicemap.DeviceMap(lambda row: row * 2 + 1, devices=devices, batch_size=batch_size)
                assert mapper(tf.range(7)).numpy().tolist() == [1, 3, 5, 7, 9, 11, 13], devices
            chosen = devicemap.devices.choose_devices(devices)
            print(*[name.partition("/replica")[0] + name[-6:] for name in chosen])
    """)
    worker = "/job:worker/replica:0/task:0/device:CPU"
    assert lines == [
        f"{HOST}/device:CPU:0 CPU",
        f"{worker}:0 CPU of another host",
        f"{worker}:1 CPU of another host",
        "/job:worker:CPU:0",
        "/job:worker:CPU:1 /job:localhost:CPU:0",
        "/job:localhost:CPU:0",
        "/job:localhost:CPU:0",
        "/job:localhost:CPU:0 /job:worker:CPU:0 /job:worker:CPU:1",
    ]
