"""Devices of remote hosts: `connect` to TensorFlow servers, and `serve` to start one.

TensorFlow servers have no passwords and no encryption, and listen on all network interfaces. Anyone who reaches the port can
run code in the process. A process that connects also runs a server, from which the hosts fetch data.
"""

from __future__ import annotations

import gc
import re
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

import tensorflow as tf

from devicemap.errors import DeviceError, OptionError

_LOCAL_JOB = "localhost"
"""The job that TensorFlow assigns to the connecting process."""

_TIMEOUT_SECONDS = 10.0
"""How long `connect` waits for each host."""

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of HTTP/2, on which gRPC builds, begins: a fixed text and an empty frame of settings (RFC 9113, 3.4)."""

_ADDRESS, _JOB = re.compile(r".+:\d+"), re.compile(r"[A-Za-z]\w*", re.ASCII)

_connected: list[str] = []
"""The addresses that this process is connected to. TensorFlow's context has one cluster per process."""


def connect(cluster: Mapping[str, Sequence[str]]) -> None:
    """Make the devices of hosts that run `devicemap serve` available to this process.

    Choose them by name, `devices=["/job:worker/task:0", "GPU:0"]`, or by kind. `list_devices` lists them. If a host is lost, a
    call in chunks moves the chunks of its devices to other devices.

    Connections have no password and no encryption. Use a private network.

    Call it once, before creating variables or tables, and after `simulate_devices` and settings of `tf.config` such as memory
    growth, because it initialises TensorFlow. Connecting clears TensorFlow's resource tables, also those of this process, so
    later assignments to existing variables would be lost silently (TensorFlow 2.21).

    Args:
        cluster: addresses `"host:port"` by job, as for `tf.train.ClusterSpec`: `{"worker": ["10.0.0.1:2222"]}`.

    Raises:
        OptionError: the cluster is not valid.
        DeviceError: a host does not answer, this process has variables, or it is connected already. Connecting to a second
            cluster crashes TensorFlow's runtime (tensorflow#33894).

    Examples:
        >>> connect({"worker": ["127.0.0.1:1"]})
        Traceback (most recent call last):
        ...
        devicemap.errors.DeviceError: no TensorFlow server answers at 127.0.0.1:1 ...
    """
    addresses = _addresses(cluster)
    if _connected:
        raise DeviceError(
            f"this process is already connected to {', '.join(_connected)}, and TensorFlow has one cluster per process; "
            "connect to all hosts in one call, and restart the program to change or reconnect them"
        )
    own = _own_address(addresses)
    if (variable := _any_variable()) is not None:
        raise DeviceError(
            f"connect was called too late: this process has variables, such as {variable.name}, and would silently lose "
            "later assignments to them; connect first"
        )
    # Name this process explicitly. By default TensorFlow uses a loopback address, where other hosts cannot fetch data.
    spec = tf.train.ClusterSpec({**cluster, _LOCAL_JOB: [own]})
    try:
        tf.config.experimental_connect_to_cluster(spec, job_name=_LOCAL_JOB)
        tf.config.list_logical_devices()  # TensorFlow connects only when it initialises its devices
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise DeviceError(f"TensorFlow could not connect to {', '.join(addresses)}: {error}") from error
    _connected.extend(addresses)


def serve(port: int, cpus: int = 1) -> tf.distribute.Server:
    """Start a TensorFlow server in this process, to which other processes can `connect`.

    Args:
        port: the port on which the server listens, on all network interfaces. 0 chooses a free port, which is in its `target`.
        cpus: the number of CPU devices.

    Raises:
        OptionError: the port is not from 0 to 65535. TensorFlow would use another one.
        DeviceError: the port is taken.
    """
    if port not in range(2**16):
        raise OptionError(f"port={port}; expected an int from 0 to 65535")
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    config = tf.compat.v1.ConfigProto(device_count={"CPU": cpus}, inter_op_parallelism_threads=threads)
    try:
        return tf.distribute.Server({"worker": [f"localhost:{port}"]}, job_name="worker", task_index=0, config=config)
    except tf.errors.OpError as error:
        raise DeviceError(f"cannot start a server at port {port}: {error}") from error


def _addresses(cluster: Any) -> list[str]:
    """Return the addresses in a cluster. Raises `OptionError` if one is invalid."""
    jobs = cluster if isinstance(cluster, Mapping) and _LOCAL_JOB not in cluster else {}
    addresses = [address for tasks in jobs.values() for address in (tasks if isinstance(tasks, Sequence) else [tasks])]
    patterns = [*((job, _JOB) for job in jobs), *((address, _ADDRESS) for address in addresses)]
    valid = all(isinstance(text, str) and pattern.fullmatch(text) for text, pattern in patterns)
    if not addresses or not valid or len(set(addresses)) < len(addresses):
        raise OptionError(
            f'cluster is {cluster!r}; expected distinct addresses by job, as {{"worker": ["10.0.0.1:2222"]}}'
        )
    return addresses


def _own_address(servers: Sequence[str]) -> str:
    """Return a free port of this machine, at the IP address from which it reaches the servers. All servers have to answer."""
    found = []
    for server in servers:
        host, _, port = server.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_SECONDS) as connection:
                found.append(connection.getsockname()[0])
                connection.sendall(_GREETING)
                if connection.makefile("rb").read(4)[3:] != b"\4":  # the server begins with a frame of settings, too
                    raise OSError("another service has this port")
        except (OSError, UnicodeError) as error:  # UnicodeError: not the name of a host
            raise DeviceError(
                f"no TensorFlow server answers at {server} ({error}); start `devicemap serve` there first"
            ) from error
    own = next((each for each in found if not ip_address(each).is_loopback), found[0])
    with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as free:
        free.bind((own, 0))
        port = free.getsockname()[1]
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _any_variable() -> tf.Variable | None:
    kinds = (tf.Variable, tf.compat.v1.Variable)
    return next((each for each in gc.get_objects() if issubclass(type(each), kinds)), None)
