"""Other hosts by TensorFlow's own remote devices: what connects to them, and what serves there.

TensorFlow's servers know no passwords: whoever reaches one runs what they like there. The process that connects has one, too,
from which hosts fetch data. They listen on all interfaces, whatever their address says (2.21); here, on Linux, those that
only this machine is to reach are kept to its loopback.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap.base.hosts import Host, connecting, known_hosts
from devicemap.base.sockets import keep_on_loopback
from devicemap.compile.invoke import attempt
from devicemap.errors import DeviceError, OptionError, warn_user

_HERE = "localhost"
"""TensorFlow's name for the job of the process that connects."""

_LEAST_SECONDS = 10.0
"""TensorFlow has them to connect: gRPC alone waits for a second before it tries again."""


class _Connection:
    """What this process is connected to: one cluster for good, as TensorFlow's context has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: str | None = None
        self._calling = threading.Lock()
        self._hangs = False
        """Whether TensorFlow has not come back from connecting for the first time."""

    def make(self, jobs: dict[str, list[str]], timeout: float) -> None:
        addresses = {
            f"/job:{job}/replica:0/task:{task}": address
            for job, tasks in jobs.items()
            for task, address in enumerate(tasks)
        }
        with self._lock:
            before = {name: host.address for name, host in known_hosts().items()}
            if self._hangs:
                raise DeviceError("an earlier connect has not ended, and may never: start another program")
            if before not in ({}, addresses):
                raise DeviceError(
                    f"this process is connected to {', '.join(before.values())}, and TensorFlow has one cluster per process: "
                    "connect to all hosts that are to be used at once, and to the same again when one was lost"
                )
            with connecting(addresses, timeout) as hosts:
                if not before and (variable := _any_variable()) is not None:
                    raise DeviceError(
                        f"connect came too late: this process has variables, such as {variable.name}, and once TensorFlow is "
                        "connected it loses what is assigned to those of before, without a word. Connect first"
                    )
                if hosts:
                    self._connect(jobs, hosts, timeout)

    def _connect(self, jobs: dict[str, list[str]], hosts: Sequence[Host], timeout: float) -> None:
        # TensorFlow would make up an address for this process in each call, of which only the first is served, and which is on
        # the loopback of this machine: hosts that fetch data from here would not find it.
        own = self._own or _own_address(hosts)
        cluster = tf.train.ClusterSpec({**jobs, _HERE: [own]})

        seconds = max(timeout, _LEAST_SECONDS)

        def connect() -> None:
            with self._calling:  # a call of before may not have ended
                for host in hosts:
                    if host.connection:
                        _reach(host, seconds)
                tf.config.experimental_connect_to_cluster(cluster, job_name=_HERE)

        # In a thread of its own: for a host that is lost meanwhile it may wait for ever.
        (outcome,) = attempt([connect], Cancellation(), seconds)
        if outcome is None:
            self._hangs = self._own is None
            known = ". It may yet do so, and lose what variables that are made meanwhile hold: end this program"
            raise DeviceError(
                f"TensorFlow has not connected to {', '.join(host.address for host in hosts)} in {seconds:g} s"
                f"{known if self._hangs else ''}"
            )
        if outcome[1] is not None:
            raise DeviceError(f"TensorFlow could not connect: {outcome[1]}") from outcome[1]
        if self._own is None and all(ip_address(host.own_address).is_loopback for host in hosts):
            try:
                keep_on_loopback(int(own.rpartition(":")[2]))
            except OSError as error:
                warn_user(
                    f"TensorFlow's server in this program, at port {own.rpartition(':')[2]}, is open to all networks, as the "
                    f"system cannot keep it to this machine: {error}",
                    RuntimeWarning,
                )
        self._own = own


_connection = _Connection()


def connect(cluster: Mapping[str, Sequence[str]], timeout: float = 10.0) -> None:
    """Make the devices of hosts on which `devicemap serve` runs devices of this process.

    They are chosen by name, `devices=["/job:worker/task:0", "GPU:0"]`, or by kind; `list_devices` lists them. Where a host is
    lost in a call, what its devices had goes to others, each row is delivered once, and later calls do without it. To use it
    again, start its server at the same address, and call this again with the same cluster.

    There is no password, and nothing is encrypted: on an open network, anybody may run code on the hosts, and here.

    Call it before there are variables or tables: TensorFlow 2.21 empties the tables of resources of this process, too, when it
    is connected first, so that `assign` goes to nobody afterwards.

    Args:
        cluster: addresses `"host:port"` by job, as for `tf.train.ClusterSpec`: `{"worker": ["10.0.0.1:2222"]}`.
        timeout: seconds without an answer after which a host is lost. Calls that wait for it fail then.

    Raises:
        OptionError: the cluster or the timeout cannot be.
        DeviceError: a host does not answer, or TensorFlow does not connect to it; this process has variables, and was not
            connected; or it is connected to other hosts. TensorFlow's runtime crashes at what was left on hosts when these
            are exchanged (tensorflow#33894).

    Examples:
        >>> connect({"worker": ["127.0.0.1:1"]})
        Traceback (most recent call last):
        ...
        devicemap.errors.DeviceError: no TensorFlow server answers at 127.0.0.1:1 ...
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise OptionError(f"timeout is {timeout!r}; expected seconds, more than 0")
    _connection.make(_checked(cluster), timeout)


def serve(port: int, cpus: int = 1, everywhere: bool = False) -> tf.distribute.Server:
    """Start TensorFlow's server in this process, for others to `connect` to.

    Args:
        port: where it listens; 0 for any free one, which `target` of the server tells.
        cpus: how many CPU devices it has.
        everywhere: whether other machines reach it; else this one only.

    Raises:
        DeviceError: the port is taken, or the system cannot keep the server to this machine.
    """
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    config = tf.compat.v1.ConfigProto(device_count={"CPU": cpus}, inter_op_parallelism_threads=threads)
    try:
        server = tf.distribute.Server({"worker": [f"localhost:{port}"]}, job_name="worker", task_index=0, config=config)
    except tf.errors.OpError as error:
        raise DeviceError(f"no server at port {port}: {error}") from error
    try:
        if not everywhere:
            keep_on_loopback(int(server.target.rpartition(":")[2]))
    except OSError as error:
        raise DeviceError(
            f"the system cannot keep a server to this machine ({error}); devicemap serve --open is for all networks"
        ) from error
    return server


def _checked(cluster: Any) -> dict[str, list[str]]:
    """Its jobs, of which each task has an address."""
    jobs = {}
    for job, tasks in cluster.items() if isinstance(cluster, Mapping) else ():
        if isinstance(tasks, Sequence) and not isinstance(tasks, str) and job != _HERE:
            jobs[job] = [*tasks]
    addresses = [address for tasks in jobs.values() for address in tasks]
    good = all(
        isinstance(each, str) and each.rpartition(":")[0] and each.rpartition(":")[2].isdecimal() for each in addresses
    )
    if not addresses or not good or len(jobs) < len(cluster):
        raise OptionError(f'cluster is {cluster!r}; expected addresses by job, as {{"worker": ["10.0.0.1:2222"]}}')
    return jobs


def _reach(host: Host, seconds: float) -> None:
    """Wait until gRPC is connected to a host again, which it tries once a second, but not longer than so many.

    TensorFlow takes one that it does not reach for a new one. Where it is not, because it had only stopped, what is made for
    the new one is lost when TensorFlow cleans up after the old one.
    """

    @tf.function(autograph=False)
    def probe(number: Any) -> Any:  # no op in eager code: where these fail once, they fail for ever
        with tf.device(f"{host.name}/device:CPU:0"):
            return number + 1

    deadline = time.monotonic() + seconds
    while True:
        try:
            probe(tf.constant(0))
        except tf.errors.UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        except tf.errors.OpError:  # it is a new one
            return
        else:
            return


def _any_variable() -> tf.Variable | None:
    kinds = (tf.Variable, tf.compat.v1.Variable)
    return next((each for each in gc.get_objects() if issubclass(type(each), kinds)), None)


def _own_address(hosts: Sequence[Host]) -> str:
    """A free port of this machine, at the address that the hosts see."""
    seen = [host.own_address for host in hosts]
    address = next((each for each in seen if not ip_address(each).is_loopback), seen[0])
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
