"""Listing, choosing and simulating devices. Tests that need another state of TensorFlow run in a fresh process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

import devicemap
from devicemap.devices import choose_devices
from devicemap.errors import DeviceError

HOST = "/job:localhost/replica:0/task:0"
CPUS = tuple(f"{HOST}/device:CPU:{i}" for i in range(8))
X = tf.range(7.0)


def test_list_devices() -> None:
    listed = devicemap.list_devices("CPU")
    assert tuple(device.name for device in listed) == CPUS
    assert devicemap.list_devices("cpu") == listed
    assert {each.kind for each in devicemap.list_devices()} == {d.device_type for d in tf.config.list_logical_devices()}
    assert devicemap.list_devices("no such kind") == []
    assert (listed[1].kind, listed[1].memory, listed[1].description) == ("CPU", None, "part 2 of 8 of CPU")
    for device in listed:
        with tf.device(device.name):
            assert tf.identity(X).device == device.name


LOGICAL = tf.config.list_logical_devices("CPU")
LISTED = devicemap.list_devices("CPU")
OF_ONE = "CPU:3", "cpu:3", "/CPU:3", "/device:CPU:3", "/job:localhost/device:CPU:3", "/job:localhost/task:0/cpu:3"
FORMS: list[tuple[list[int], list[Any]]] = [
    ([*range(8)], ["CPU", "cpu", tf.config.list_physical_devices("CPU")]),
    ([3], [*OF_ONE, CPUS[3], LISTED[3], LOGICAL[3]]),
    ([5, 1, 2], [["CPU:5", "/CPU:1", "/device:CPU:2"]]),
    (
        [5, 1],
        [("CPU:5", CPUS[1]), np.array(["CPU:5", "CPU:1"]), (f"CPU:{i}" for i in (5, 1)), [LOGICAL[5], LOGICAL[1]]],
    ),
    ([6, 5], [LISTED[6:4:-1]]),
    ([6], [{"CPU:6"}]),
    ([6, 0, 3], [[LISTED[6], "CPU:0", LOGICAL[3]]]),
]


def test_forms_of_devices() -> None:
    for chosen, forms in FORMS:
        for devices in forms:
            assert choose_devices(devices) == tuple(CPUS[i] for i in chosen)


def test_results_are_gathered_on_the_output_device() -> None:
    options = {"devices": ["CPU:1", "CPU:2"]}
    for output_device in ("CPU:6", "/device:CPU:6", CPUS[6], LOGICAL[6], LISTED[6]):
        for batch_size in (None, 2):
            mapper = devicemap.DeviceMap(tf.negative, output_device=output_device, batch_size=batch_size, **options)
            y = mapper(X)
            np.testing.assert_array_equal(y, -X)
            assert y.backing_device == CPUS[6]  # y.device is where the op ran that called the graph
            assert mapper(X[:0]).backing_device == CPUS[6]


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorFlow reports a machine with three GPUs: the first cut into two, the third hidden."""
    if not tf.config.list_physical_devices("GPU"):
        assert choose_devices(None) == CPUS
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(3)]
    cpu = tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=mebibytes) for mebibytes in (2048, 4096)]
    logical = [tf.config.LogicalDevice(f"/device:{name}", name[:3]) for name in ("CPU:0", "GPU:0", "GPU:1", "GPU:2")]
    answers = {
        "get_visible_devices": lambda: [cpu, *gpus[:2]],
        "get_logical_device_configuration": lambda device: halves if device == gpus[0] else None,
        "list_logical_devices": lambda kind=None: [d for d in logical if kind in (None, d.device_type)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(tf.config, name, answer)
    details = lambda device: {"device_name": "H200"} if device.device_type == "GPU" else {}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details)
    names = tuple(f"{HOST}/device:GPU:{i}" for i in range(3))
    assert choose_devices(None) == choose_devices("GPU") == choose_devices(gpus[:2]) == names
    assert choose_devices([gpus[1], gpus[0]]) == (names[2], *names[:2])
    for devices, message in (
        ([gpus[0], "GPU:1"], "GPU:1 more than once"),
        (gpus[2:], "'/physical_device:GPU:2', which is not a device here; there is CPU:0, GPU:0, "),
    ):
        with pytest.raises(DeviceError, match=message):
            choose_devices(devices)
    assert [(device.memory, device.description) for device in devicemap.list_devices()] == [
        (None, "CPU"),
        (2 * 2**30, "part 1 of 2 of H200"),
        (4 * 2**30, "part 2 of 2 of H200"),
        (None, "H200"),
    ]


def test_importing_changes_nothing_and_simulating_in_a_fresh_process() -> None:
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
                "warnings": list(warnings.filters),
                "numpy": [np.geterr(), np.random.get_state()[1].tolist()],
                "random": random.getstate(),
                "tensorflow": [
                    tf.config.threading.get_inter_op_parallelism_threads(),
                    tf.config.get_visible_devices(),
                    tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]),
                ],
            }

        before = state()
        import devicemap
        after = state()
        print([key for key in before if before[key] != after[key]])
        devicemap.simulate_devices(2)
        devicemap.simulate_devices(np.int64(5))
        print(tf.config.threading.get_inter_op_parallelism_threads())
        tf.config.threading.set_inter_op_parallelism_threads(9)
        devicemap.simulate_devices(3)
        print(tf.config.threading.get_inter_op_parallelism_threads())
        print(len(devicemap.list_devices("CPU")), len(tf.config.list_logical_devices("CPU")))
        print(devicemap.parallel_map(lambda row: row * 2, [1, 2, 3, 4], devices="CPU").numpy().tolist())
    """)
    assert lines == ["[]", str(max(6, os.cpu_count() or 1)), "9", "3 3", "[2, 4, 6, 8]"]


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


@pytest.mark.skipif("sys.platform != 'linux'")
def test_forks() -> None:
    """A child of a process with devices gets an error instead of waiting forever. A child of another process works."""
    printed = processes.run("""
        import os, sys
        import tensorflow as tf
        import devicemap

        def child(call):
            sys.stdout.flush()
            if os.fork() == 0:
                try:
                    print(call())
                except devicemap.errors.DeviceError as error:
                    print(error)
                sys.stdout.flush()
                os._exit(0)
            os.wait()

        child(lambda: devicemap.parallel_map(lambda n: n + 1, [1, 2]).numpy().tolist())
        mapper = devicemap.DeviceMap(lambda n: n + 1)
        mapper([1, 2])
        child(lambda: mapper([1, 2]))
        child(lambda: devicemap.parallel_map(lambda n: n + 2, [1, 2]))
    """)
    assert printed[0] == "[2, 3]"
    assert len(printed) == 3
    for line in printed[1:]:
        assert line.startswith("this process was forked after TensorFlow was initialised, ")
