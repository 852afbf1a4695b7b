"""Interruptions: Ctrl-C, and what other signal handlers raise, come out as they are, at once, from every way of calling."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import threading
from typing import Any

import processes
import pytest
import tensorflow as tf

import devicemap
from devicemap.base.interruption import Signals

WAYS = """
import os, signal, sys, tempfile, threading, time
import tensorflow as tf
import devicemap

devicemap.simulate_devices(3)

class OutOfTime(TimeoutError):
    "What a soft time limit raises."

def out_of_time(number, frame):
    raise OutOfTime

signal.signal(signal.SIGALRM, out_of_time)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without one
sent = []

def send(*_):
    "Interrupt the call, once."
    if not sent:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)
    return 0.0

def endless(row):
    if row[0] == 0.0:
        return row
    row += tf.py_function(send, [], tf.float32)  # before the loops take all threads
    while tf.reduce_sum(row) >= 0.0:
        row = row + 1e-9
    return row

def endless_again(row):
    "Fails the first time, and never ends when that is to be located."
    def python():
        if not failed:
            failed.append(True)
            raise ValueError("odd value")
        return send()
    row += tf.py_function(python, [], tf.float32)
    while tf.reduce_sum(row) >= 0.0:
        row = row + 1e-9
    return row

failed = []

def while_tracing(row):
    send()
    return row

class Dropped:
    def __del__(self):
        send()  # Python drops what is raised here

def lost_while_tracing(row):
    Dropped()
    return row

DATA, QUICK = tf.ones([6, 2]), tf.zeros([6, 2])

def taped(mapper, data):
    with tf.GradientTape() as tape:
        tape.watch(data)
        return mapper(data)

def at_once(mapper):
    others = [threading.Thread(target=mapper, args=(QUICK,)) for _ in range(3)]
    for other in others:
        other.start()
    try:
        mapper(DATA)
    finally:
        for other in others:
            other.join()

def quick_before(call, data=DATA):
    for _ in range(3):
        call(QUICK)
    call(data)

def mapper(fn=endless, **options):
    return devicemap.DeviceMap(fn, **options)

WAYS = {
    "one graph": lambda: mapper()(DATA),
    "quick calls before": lambda: quick_before(mapper()),
    "quick calls on fewer rows before": lambda: quick_before(mapper(), tf.ones([100_000, 2])),
    "a tape": lambda: taped(mapper(), DATA),
    "a tape, quick calls before": lambda: (lambda m: quick_before(lambda data: taped(m, data)))(mapper()),
    "calls at once": lambda: at_once(mapper()),
    "the second run of what failed": lambda: mapper(endless_again)(DATA),
    "chunks": lambda: mapper(batch_size=1)(DATA),
    "a dataset": lambda: mapper()(tf.data.Dataset.from_tensor_slices(DATA)),
    "a stream": lambda: list(mapper(batch_size=1).stream(DATA)),
    "to disk": lambda: mapper(batch_size=1).write(DATA, tempfile.mkdtemp()),
    "verify": lambda: mapper().verify(DATA),
    "while tracing": lambda: mapper(while_tracing)(DATA),
    "while tracing for chunks": lambda: mapper(while_tracing, batch_size=2)(DATA),
    "explain": lambda: mapper(while_tracing).explain(DATA),
    "lost while tracing": lambda: mapper(lost_while_tracing)(DATA),
}

SIGNALS = (signal.SIGALRM, "OutOfTime"), (signal.SIGINT, "KeyboardInterrupt")
for i, (name, call) in enumerate(WAYS.items()):
    for number, raised in SIGNALS if sys.argv[1] == "all" else SIGNALS[i % 2 :][:1]:
        failed.clear()
        sent.clear()
        try:
            call()
            outcome = "nothing"
        except BaseException as error:
            outcome = type(error).__name__
        name = f"{number.name}: {name}"
        assert outcome == raised, (name, outcome)
        assert (seconds := time.monotonic() - sent[0]) < 2, (name, seconds)
        deadline = time.monotonic() + 10
        while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")]:
            assert time.monotonic() < deadline, (name, left)
            time.sleep(0.01)
        assert signal.getsignal(signal.SIGALRM) is out_of_time, name
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, name
print("right")
"""


def test_what_a_handler_raises_comes_out_at_once(pytestconfig: pytest.Config) -> None:
    """From a whole process, which ends well: what was not cancelled would keep it. The two signals take turns."""
    assert processes.run(WAYS, "all" if pytestconfig.getoption("all") else "each") == ["right"]


class OutOfTimeError(TimeoutError):
    """What a soft time limit raises."""


@pytest.fixture
def handler() -> Any:
    """A handler that raises, for SIGUSR1."""

    def out_of_time(number: int, frame: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGUSR1, out_of_time)
    yield out_of_time
    signal.signal(signal.SIGUSR1, before)


def _interrupt() -> None:
    signal.raise_signal(signal.SIGUSR1)


def _failing_of_it() -> None:
    with Signals():
        try:
            _interrupt()
        except OutOfTimeError as error:
            raise ValueError("odd value") from error


def _dropping_it() -> None:
    with Signals(), contextlib.suppress(OutOfTimeError):
        _interrupt()


def _within_another() -> None:
    with Signals(), contextlib.suppress(OutOfTimeError), Signals():
        _interrupt()


@pytest.mark.parametrize("what", [_failing_of_it, _dropping_it, _within_another])
def test_it_comes_out_whatever_became_of_it(handler: Any, what: Any) -> None:
    with pytest.raises(OutOfTimeError) as caught:
        what()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_handlers_that_raise_nothing_are_left_alone(handler: Any) -> None:
    """asyncio's ask that system calls go on after a signal, which a new handler would undo."""
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGUSR2, int)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGCHLD, signal.SIGWINCH)}
    with Signals():
        assert signal.getsignal(signal.SIGUSR1) is not handler
        assert {number: signal.getsignal(number) for number in before} == before
    loop.remove_signal_handler(signal.SIGUSR2)
    loop.close()


def test_it_is_no_error_of_the_disk(handler: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> bool:
        _interrupt()
        return True

    monkeypatch.setattr("devicemap.store.storage._lock", interrupted)
    with pytest.raises(OutOfTimeError):
        devicemap.DeviceMap(lambda n: n * n, batch_size=2).write(tf.range(5), tmp_path)


def test_it_comes_out_where_it_is_checked(handler: Any) -> None:
    reached = []

    def on_and_on() -> None:
        with Signals() as signals:
            for i in range(3):
                reached.append(i)
                with contextlib.suppress(OutOfTimeError):
                    _interrupt()
                signals.check()

    with pytest.raises(OutOfTimeError):
        on_and_on()
    assert reached == [0]


def test_without_a_signal_errors_stay_as_they_are(handler: Any) -> None:
    def fail() -> None:
        with Signals() as signals:
            signals.check()
            raise ValueError("odd value")

    with pytest.raises(ValueError, match="odd value"):
        fail()
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_ctrl_c_after_what_was_dropped_is_what_comes_out(handler: Any) -> None:
    def go_on() -> None:
        with Signals():
            with contextlib.suppress(OutOfTimeError):
                _interrupt()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on()


def test_handlers_that_are_set_within_are_left_alone(handler: Any) -> None:
    def other(number: int, frame: Any) -> None:
        raise TimeoutError

    with Signals():
        signal.signal(signal.SIGUSR1, other)
        with pytest.raises(TimeoutError):
            signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is other


def test_other_threads_watch_nothing(handler: Any) -> None:
    seen = []

    def look() -> None:
        with Signals():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]
