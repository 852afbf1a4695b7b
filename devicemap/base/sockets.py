"""The sockets of this process that others have opened: TensorFlow's, which has no names for what is done to them here."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Container, Iterator
from typing import Any


def resolved(address: str) -> set[tuple[str, int]]:
    """IP addresses and port of `host:port`."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return {_plain(peer) for *_, peer in found}


def shut_down(peers: Container[tuple[str, int]]) -> None:
    """End all connections to these IP addresses and ports: whoever reads from one finds it closed."""
    for connection in _sockets():
        try:
            if _plain(connection.getpeername()) in peers:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected, or not any more
            continue


def keep_on_loopback(port: int) -> None:
    """Let a server of this process that listens on all interfaces be reached from this machine only.

    Raises:
        OSError: the system cannot; Linux can since 5.7.
    """
    for server in _sockets():
        if server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and server.getsockname()[1] == port:
            server.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_BINDTODEVICE", 25), b"lo\0")
            return
    raise OSError(f"this process has no server at port {port}, or the system does not show it")


def _sockets() -> Iterator[socket.socket]:
    """Those for IP, by other descriptors, which are closed again."""
    try:
        numbers = os.listdir("/dev/fd")
    except OSError:
        return
    for number in numbers:
        try:
            copy = os.dup(int(number))
        except OSError:  # closed meanwhile
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found


def _plain(peer: tuple[Any, ...]) -> tuple[str, int]:
    """gRPC's sockets are for both versions of IP."""
    return peer[0].removeprefix("::ffff:"), peer[1]
