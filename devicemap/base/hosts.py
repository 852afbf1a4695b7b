"""Other hosts that this process is connected to: which of them are lost, and an end to what waits for those.

TensorFlow does not tell. What calls a process that has ended fails at once, with `UnavailableError`, and what runs elsewhere
goes on. But a call on one that is stopped, or behind a network that fails, never returns, as in tensorflow#14489; nor does
the runtime's own `check_alive`, which holds Python's lock meanwhile (2.21). So each host is asked, at each beat, by a
connection beside TensorFlow's: its server speaks gRPC, which is HTTP/2, and answers a frame of settings (RFC 9113, 6.5.3)
whatever it computes. Where the connection is closed the process has ended, even if another one listens at its address, which
knows nothing of what was there.

Calls that wait for a lost host end when TensorFlow's connections to it are shut down on this side: they fail as if it had
ended. gRPC tries once more by a new connection, so that is done at each beat, too.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import tensorflow as tf

from devicemap.base.sockets import resolved, shut_down
from devicemap.errors import DeviceError, HostLostError

_BEAT_SECONDS = 0.5
"""Between two questions, each of which takes 50 microseconds over loopback."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING = 4, 6
_ANSWER = 1
"""The flag of frames that acknowledge another one."""

_connections = itertools.count(1)


class Host:
    """A process on another host. Its lock is held while it is asked, and while it is connected."""

    _line: socket.socket
    _answers: BinaryIO
    _peers: set[tuple[str, int]]

    def __init__(self, name: str, address: str):
        """`name`: what full names of its devices begin with, `/job:worker/replica:0/task:0`. `address`: `host:port`."""
        self.name = name
        self.address = address
        self.own_address = ""
        """That of this machine, as the host sees it."""
        self.connection = 0
        """Number of the connection to it."""
        self.why_lost: str | None = "is not connected"
        self._lock = threading.Lock()

    @contextmanager
    def connecting(self, timeout: float) -> Iterator[None]:
        """Get an answer from it; within, TensorFlow connects. From then on it is lost after `timeout` seconds without one.

        Raises:
            DeviceError: it does not answer.
        """
        with self._lock:
            try:
                self._open(timeout)
            except OSError as error:
                raise DeviceError(
                    f"no TensorFlow server answers at {self.address} within {timeout:g} s ({error}); start `devicemap serve` "
                    "there first"
                ) from error
            try:
                yield
            except BaseException:
                self._close()
                raise
            self.connection, self.why_lost = next(_connections), None

    def is_lost(self) -> bool:
        """Ask it now. Once lost it stays so, until it is connected again."""
        with self._lock:
            return self._is_lost()

    def watch(self) -> None:
        """Ask it at each beat, for ever; while it is lost, end what waits for it."""
        while True:
            with self._lock:
                if self._is_lost():
                    shut_down(self._peers)
            time.sleep(_BEAT_SECONDS)

    def _is_lost(self) -> bool:
        if self.why_lost is None:
            try:
                self._ask()
            except OSError as error:
                silent = f"has not answered for {self._line.gettimeout():g} s"
                self.why_lost = silent if isinstance(error, TimeoutError) else "has ended"
                self._close()
        return self.why_lost is not None

    def _open(self, timeout: float) -> None:
        host, _, port = self.address.rpartition(":")
        self._peers = resolved(self.address)
        self._line = socket.create_connection((host.strip("[]"), int(port)), timeout)
        self._answers = self._line.makefile("rb")
        self.own_address = self._line.getsockname()[0]
        try:
            self._line.sendall(_PREFACE)
            self._ask()
        except OSError:
            self._close()
            raise

    def _ask(self) -> None:
        self._line.sendall(_frame(_SETTINGS))
        while True:
            head = self._answers.read(9)
            if len(head) < 9:
                raise ConnectionError("it has closed the connection")
            kind, answers = head[3], head[4] & _ANSWER
            content = self._answers.read(int.from_bytes(head[:3], "big"))
            if kind == _SETTINGS and answers:
                return
            if kind in (_SETTINGS, _PING) and not answers:  # gRPC ends connections that owe it an answer for a minute
                self._line.sendall(_frame(kind, _ANSWER, content if kind == _PING else b""))

    def _close(self) -> None:
        self._answers.close()
        self._line.close()


def _frame(kind: int, flags: int = 0, content: bytes = b"") -> bytes:
    """Of HTTP/2, for the connection as a whole: length (3 bytes), kind, flags, stream (4 bytes), content."""
    return bytes([0, 0, len(content), kind, flags, 0, 0, 0, 0]) + content


_hosts: dict[str, Host] = {}
"""By name; a process has one cluster, as TensorFlow's context has."""


@contextmanager
def connecting(addresses: Mapping[str, str], timeout: float) -> Iterator[list[Host]]:
    """Get an answer from those of the hosts, addresses by name, that are not connected; within, TensorFlow connects to these.

    Raises:
        DeviceError: one of them does not answer.
    """
    missing = [host for name in addresses if (host := _hosts.get(name) or Host(name, addresses[name])).is_lost()]
    with ExitStack() as stack:
        for host in missing:
            stack.enter_context(host.connecting(timeout))
        yield missing
    for host in missing:
        if host.name not in _hosts:
            _hosts[host.name] = host
            threading.Thread(target=host.watch, name=f"devicemap heartbeat {host.name}", daemon=True).start()


def host_of(device: str) -> str:
    """What names its host in a device's full name.

    >>> host_of("/job:worker/replica:0/task:1/device:GPU:0")
    '/job:worker/replica:0/task:1'
    """
    return device.partition("/device:")[0]


def known_hosts() -> Mapping[str, Host]:
    """By name."""
    return _hosts


def connections_of(devices: Iterable[str]) -> tuple[int | None, ...]:
    """By which connection each device is reached: `None` if it is lost, 0 if it is here. `()` if there are no other hosts."""
    if not _hosts:
        return ()
    hosts = [_hosts.get(host_of(device)) for device in devices]
    return tuple(0 if host is None else None if host.why_lost else host.connection for host in hosts)


def reachable(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the devices that are here, or on hosts that are not lost.

    Raises:
        HostLostError: none is.
    """
    left = tuple(device for device, number in zip(devices, connections_of(devices)) if number is not None)
    if _hosts and not left:
        raise _lost_error(devices)
    return left or devices


def settle(devices: Iterable[str]) -> None:
    """Wait until the hosts of devices have done what eager code has sent to them: TensorFlow's functions over several hosts
    overtake that, and read what variables held before they were assigned (2.21)."""
    asked = []
    for host in dict.fromkeys(map(host_of, devices)) if _hosts else ():
        if host in _hosts:
            with tf.device(f"{host}/device:CPU:0"):
                asked.append(tf.timestamp())
    for answer in asked:
        answer.numpy()


def lost_among(devices: Iterable[str]) -> HostLostError | None:
    """Ask the hosts of devices on which something has failed; the error that tells of those that are lost."""
    hosts = {host_of(device): device for device in devices}
    lost = [device for name, device in hosts.items() if (host := _hosts.get(name)) is not None and host.is_lost()]
    return _lost_error(lost) if lost else None


def _lost_error(devices: Iterable[str]) -> HostLostError:
    lost = dict.fromkeys(_hosts[host_of(device)] for device in devices)
    told = " and ".join(f"{host.name} ({host.address}) {host.why_lost}" for host in lost)
    return HostLostError(
        f"lost: {told}. Calls go on with the devices that are left, if they have any; start `devicemap serve` "
        "there again, and call devicemap.connect as before"
    )
