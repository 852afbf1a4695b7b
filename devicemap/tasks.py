"""Independent Python jobs. Each device runs one at a time, in a thread under `tf.device`."""

from __future__ import annotations

import inspect
import reprlib
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.functions import last_set_seed
from devicemap._tensorflow.gradients import tape_is_recording
from devicemap._tensorflow.keras_calls import dtype_policy
from devicemap.compile.invoke import receive
from devicemap.devices import choose_devices, task_device
from devicemap.errors import DataError, DeviceMapError, add_note, warn_user
from devicemap.events import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    Event,
    RowFailed,
    Shard,
    short_name,
)
from devicemap.inspect.recorder import ProgressBar
from devicemap.options import check_options

_BY_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def parallel_tasks(
    fn: Callable[..., Any],
    items: Iterable[Any],
    *,
    devices: Any = None,
    max_retries: int = 0,
    on_error: Literal["raise", "skip"] = "raise",
    progress: Any = False,
    name: str | None = None,
) -> list[Any]:
    """Call `fn(item)` for each item, on several devices at once: independent jobs such as a Keras `fit` or an MCMC chain.

    Each device runs one task at a time, in a thread of its own under `tf.device`. The next item goes to the first idle device.
    Tasks share the memory of the process, so data is not copied. Inside a task, `devices=None` of `parallel_map` and
    `parallelize` means the device of the task.

    Args:
        fn: an ordinary Python function. It gets the full name of its device as well if it has a parameter `device` that a
            `functools.partial` has not set.
        items: any objects; they are read before the first task starts.
        devices: as for `parallel_map`.
        max_retries: how often a task that raised an exception is tried again.
        on_error: "raise": running tasks finish, no further task starts, and the first exception is raised. "skip": the
            exception takes the place of the result.
        progress: `True` for a progress bar, or a callable that gets each `devicemap.types.Event`, one at a time. The rows of
            an event are the number of the item.
        name: a name for the progress bar.

    Returns:
        The results in the order of items; any objects.

    Raises:
        OptionError, DataError: before anything runs, for invalid arguments.
        Exception: what `fn` raises, with a note that names the item and the device.

    Warns:
        RuntimeWarning: a task has set the global seed, with several devices.

    Threads share global seeds. Give seeds to layers, initializers and generators, and do not call
    `keras.utils.clear_session()` in a task. Then each model equals one that is trained alone. After `tf.random.set_seed`, a
    `tf.function` that several tasks call draws the same numbers on each device, so give each task a `tf.random.Generator`.

    Ctrl-C returns at once. A Python function cannot be interrupted from outside, so running tasks continue in daemon threads
    until they end.

    Examples:
        >>> parallel_tasks(lambda n: n * n, [1, 2, 3])
        [1, 4, 9]
    """
    checked = check_options(
        fn, {"devices": devices, "max_retries": max_retries, "on_error": on_error, "progress": progress, "name": name}
    )
    is_scalar = getattr(items, "shape", None) == ()
    if is_scalar or isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise DataError(f"items is {items!r:.80}; expected a list, or another iterable of the arguments of fn")
    if not tf.executing_eagerly():
        raise DeviceMapError("parallel_tasks was called inside a tf.function, which runs no Python; call it outside")
    if tape_is_recording():
        raise DeviceMapError(
            "a GradientTape is recording, and does not see what the threads of the tasks compute: open the tape in fn, or put "
            "the call into `with tape.stop_recording():` if you need no gradients"
        )
    bar = ProgressBar(name or str(getattr(fn, "__name__", "tasks"))) if progress is True else None
    observe = bar or (progress if callable(progress) else lambda event: None)
    call = _Call(fn, [*items], int(max_retries), checked.skips, observe)
    return call.run(choose_devices(devices))


_Ended = tuple[Shard, float, Any, BaseException | None]
"""A message of a worker: the number of an item with the device, when the task started, and its result or error."""


@dataclass
class _Call:
    """A call of `parallel_tasks`. The calling thread owns all state. Workers run the items in their queues."""

    fn: Callable[..., Any]
    items: Sequence[Any]
    max_retries: int
    skips: bool
    observe: Callable[[Event], object]

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._set_up_keras = _keras_settings()
        self._passes_device = _takes_device(self.fn)
        self._waiting = deque(range(len(self.items)))
        self._queues: dict[str, SimpleQueue[Shard | None]] = {}
        self._ended: SimpleQueue[_Ended] = SimpleQueue()
        self._running = 0
        self._failures: Counter[int] = Counter()

    def run(self, devices: Sequence[str]) -> list[Any]:
        """Run all tasks and return their results."""
        self._queues = {device: SimpleQueue() for device in devices[: len(self.items)]}
        workers = [
            Thread(target=copy_context().run, args=(self._work, device), name="devicemap task", daemon=True)
            for device in self._queues
        ]
        error: BaseException | None = None
        seeding = last_set_seed()
        try:
            self.observe(CallStarted(0.0, len(self.items), tuple(self._queues)))
            for worker in workers:
                worker.start()
            results = self._collect()
            if len(workers) > 1 and last_set_seed() is not seeding:
                warn_user(
                    "a task set the global seed, by tf.random.set_seed or keras.utils.set_random_seed. All threads draw from "
                    "it, in an order that changes from run to run. Give seeds to initializers, layers and generators",
                )
            return results
        except BaseException as raised:
            error = raised
            raise
        finally:
            for queue in self._queues.values():
                queue.put(None)
            if not self._running:  # after Ctrl-C or an error of the observer, running tasks end later
                for worker in workers:
                    if worker.ident is not None:  # it is started
                        worker.join()
            try:
                self.observe(CallFinished(self._now(), error))
            finally:
                error = None  # the traceback refers to this frame, and the cycle would keep the results of other tasks

    def _work(self, device: str) -> None:
        """Run the tasks in the queue of a device until `None` comes: the target of a worker's thread."""
        task_device.set(device)
        self._set_up_keras()
        keywords = {"device": device} if self._passes_device else {}
        while (shard := self._queues[device].get()) is not None:
            started, result, error = self._now(), None, None
            try:
                with tf.device(device):
                    result = self.fn(self.items[shard.start], **keywords)
            except BaseException as raised:  # SystemExit also ends the call
                error = raised
            self._ended.put((shard, started, result, error))
            del result, error
        del self  # the tracebacks of skipped errors refer to this frame, and would keep all items alive

    def _collect(self) -> list[Any]:
        """Return the results when all tasks have ended, or raise the first error that is not retried or skipped."""
        results: list[Any] = [None] * len(self.items)
        first: BaseException | None = None
        for device in self._queues:
            self._start_next(device)
        while self._running:
            shard, started, result, error = receive(self._ended)
            self._running -= 1
            number = shard.start
            if error is None:
                results[number] = result
                self.observe(ChunkFinished(self._now(), shard, started))
            else:
                self.observe(ChunkFailed(self._now(), shard, started, error))
                self._failures[number] += 1
                again = isinstance(error, Exception) and self._failures[number] <= self.max_retries
                if first is not None:
                    pass
                elif again:
                    self._waiting.append(number)
                elif self.skips and isinstance(error, Exception):
                    self.observe(RowFailed(self._now(), shard, error))
                    results[number] = _with_note(error, shard, self.items[number])
                else:
                    first = _with_note(error, shard, self.items[number])
                    self._waiting.clear()
            del result, error  # the traceback refers to objects of the task
            self._start_next(shard.device)
        try:
            if first is not None:
                raise first
            return results
        finally:
            del first

    def _start_next(self, device: str) -> None:
        """Send the next item, if there is one, to an idle device."""
        if self._waiting:
            number = self._waiting.popleft()
            shard = Shard(device, number, number + 1)
            if self._failures[number]:
                self.observe(ChunkRetried(self._now(), shard, self._failures[number] + 1))
            self.observe(ChunkStarted(self._now(), shard, 0.0))
            self._running += 1
            self._queues[device].put(shard)

    def _now(self) -> float:
        """Return the seconds since the call began."""
        return time.perf_counter() - self._began


def _keras_settings() -> Callable[[], None]:
    """Return a function that copies this thread's settings of Keras, its dtype policy and logging, to another thread.

    Keras has these settings per thread. A new thread would silently use the defaults (test_settings_of_keras_hold_in_tasks).
    """
    config = getattr(sys.modules.get("keras"), "config", None)  # None if Keras was not imported
    if config is None:
        return lambda: None
    policy, prints = dtype_policy(), config.is_interactive_logging_enabled()

    def set_up() -> None:
        if policy is not None:
            config.set_dtype_policy(policy)
        (config.enable_interactive_logging if prints else config.disable_interactive_logging)()

    return set_up


def _takes_device(fn: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `device` besides the first one."""
    try:
        others = [*inspect.signature(fn).parameters.values()][1:]
    except Exception:  # an unknown signature, or an error of an object that computes it
        return False
    if isinstance(fn, partial) and "device" in fn.keywords:  # the user chose the device
        return False
    return any(other.name == "device" and other.kind in _BY_KEYWORD for other in others)


def _with_note(error: Any, shard: Shard, item: Any) -> BaseException:
    note = f"item {shard.start} on {short_name(shard.device)}"
    with suppress(Exception):  # reprlib fails for classes that have the name of a built-in one
        note += f": {reprlib.repr(item)}"
    add_note(error, note)
    return error
