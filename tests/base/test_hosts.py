"""How other hosts are asked whether they live, against servers that are scripted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from devicemap.base.hosts import Host
from devicemap.base.sockets import keep_on_loopback, resolved, shut_down
from devicemap.errors import DeviceError

SETTINGS, ANSWER = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
PING, PONG = (bytes([0, 0, 8, 6, flag, 0, 0, 0, 0]) + b"12345678" for flag in (0, 1))
WINDOW = bytes([0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 1, 0, 0])
TIMEOUT = 0.5
Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that does what it is given with the first connection, and gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(act: Callable[[socket.socket], None]) -> str:
            def run() -> None:
                with server.accept()[0] as line:
                    assert read(line, 24).startswith(b"PRI * HTTP/2.0")
                    act(line)

            threading.Thread(target=run, daemon=True).start()
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield serve


def read(line: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += line.recv(count - len(found)) or pytest.fail("the connection is closed")
    return found


def test_what_the_server_asks_is_answered(serve: Serve) -> None:
    """gRPC closes a connection on which its settings, or its pings, are not acknowledged in time."""
    answers: list[bytes] = []

    def act(line: socket.socket) -> None:
        assert read(line, 9) == SETTINGS
        line.sendall(SETTINGS + WINDOW)
        answers.append(read(line, 9))
        line.sendall(PING)
        answers.append(read(line, 17))
        line.sendall(ANSWER)
        read(line, 9)
        line.sendall(ANSWER)

    host = Host("/job:worker/replica:0/task:0", serve(act))
    assert host.is_lost()
    with host.connecting(TIMEOUT):
        pass
    assert answers == [ANSWER, PONG]
    assert [host.is_lost(), host.is_lost()] == [False, True]


@pytest.mark.parametrize("ends", [True, False])
def test_lost(serve: Serve, ends: bool) -> None:
    over = threading.Event()

    def act(line: socket.socket) -> None:
        read(line, 9)
        line.sendall(ANSWER)
        if not ends:
            over.wait()

    host = Host("/job:worker/replica:0/task:0", serve(act))
    with host.connecting(TIMEOUT):
        pass
    assert host.is_lost()
    assert host.why_lost is not None
    assert ("ended" in host.why_lost) == ends
    over.set()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_no_such_server(serve: Serve, answer: bytes | None) -> None:
    """One that closes the connection, one that speaks otherwise, and one that says nothing."""
    over = threading.Event()

    def act(line: socket.socket) -> None:
        line.sendall(answer or b"")
        if answer is None:
            over.wait()

    host = Host("/job:worker/replica:0/task:0", serve(act))
    with pytest.raises(DeviceError, match="devicemap serve"), host.connecting(TIMEOUT):
        pytest.fail("it is none")
    assert host.is_lost()
    over.set()


def test_connections_are_shut_down() -> None:
    """Those of this process to an address, whoever has made them."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        lines = [socket.create_connection(each.getsockname()) for each in (server, other)]
        shut_down(resolved(f"localhost:{server.getsockname()[1]}"))
        lines[0].settimeout(5)
        assert lines[0].recv(1) == b""
        lines[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            lines[1].recv(1)
        for line in lines:
            line.close()


def test_kept_on_loopback() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        keep_on_loopback(port)
        socket.create_connection(("127.0.0.1", port)).close()
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).startswith(b"lo")
    with pytest.raises(OSError, match="no server"):
        keep_on_loopback(port)
