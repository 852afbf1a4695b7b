"""Independent Python jobs. Each device runs one at a time, as a chunk of the chunk engine under `tf.device`."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.functions import last_set_seed, summary_settings
from devicemap._tensorflow.gradients import tape_is_recording
from devicemap._tensorflow.keras_calls import dtype_policy
from devicemap.data.rows import Rows
from devicemap.data.sources import Chunk, MemorySource
from devicemap.devices import choose_devices, task_device
from devicemap.errors import DataError, DeviceMapError, add_note, warn_user
from devicemap.events import Shard, short_name
from devicemap.inspect.recorder import ProgressBar
from devicemap.options import check_options
from devicemap.run.chunk_engine import run_chunks
from devicemap.run.retries import RetryAction
from devicemap.run.workers import Call, Runner

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
        max_retries: how often a task that raised an exception is tried again, first on a device that has not tried it.
        on_error: "raise": running tasks finish, no further task starts, and the first exception is raised. "skip": the
            exception takes the place of the result.
        progress: `True` for a progress bar, or a callable that gets each `devicemap.types.Event`, one at a time, in the thread
            of a task. The rows of an event are the number of the item.
        name: a name for the progress bar.

    Returns:
        The results in the order of items; any objects.

    Raises:
        OptionError, DataError: before anything runs, for invalid arguments.
        Exception: what `fn` raises, with a note that names the item and the device. A `StopIteration` is the `__cause__` of a
            `RuntimeError`, as in generators.

    Warns:
        RuntimeWarning: a task has set the global seed, with several devices.

    Threads share global seeds. Give seeds to layers, initializers and generators, and do not call
    `keras.utils.clear_session()` in a task. Then each model equals one that is trained alone. After `tf.random.set_seed`, a
    `tf.function` that several tasks call draws the same numbers on each device, so give each task a `tf.random.Generator`.

    Ctrl-C returns within a second. A Python function cannot be interrupted from outside, so running tasks continue in daemon
    threads until they end.

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
    seeding, names, items = last_set_seed(), choose_devices(devices), [*items]
    results: list[Any] = [None] * len(items)
    skipped: dict[int, BaseException] = {}
    call = Call(
        choose_action=_action_after,
        are_tasks=True,
        max_retries=int(max_retries),
        skips=checked.skips,
        leave_out=lambda item, shard, error: skipped.update({shard.start: error}),
        observe=observe,
    )
    set_up = summary_settings(), _keras_settings()
    runners = [
        Runner(device, partial(copy_context().run, _task_function, fn, device, set_up), in_flight=1)
        for device in names[: max(1, len(items))]
    ]
    for result in run_chunks(MemorySource(Rows((), (items,), len(items)), 1), runners, call):
        for number, value in result.results.items():
            results[number] = value
    while skipped:  # the traceback of each error refers to the call, and so to this dict
        number, error = skipped.popitem()
        results[number] = error
    if len(runners) > 1 and last_set_seed() is not seeding:
        warn_user(
            "a task set the global seed, by tf.random.set_seed or keras.utils.set_random_seed. All threads draw from it, in "
            "an order that changes from run to run. Give seeds to initializers, layers and generators",
        )
    return results


def _action_after(
    error: BaseException, rows: int, attempts: int, max_retries: int, alone: bool, skips: bool
) -> RetryAction:
    """Return the action after a task failed, like `action_after`. Any exception may be transient."""
    if not isinstance(error, Exception):  # SystemExit also ends the call
        return RetryAction.RAISE
    if attempts <= max_retries:
        return RetryAction.RETRY
    return RetryAction.LEAVE_OUT if skips else RetryAction.RAISE


def _task_function(fn: Callable[..., Any], device: str, set_up: Iterable[Callable[[], None]]) -> Callable[[Chunk], Any]:
    """Return the function that runs a task on a device, in the thread and the context of this call."""
    task_device.set(device)
    for each in set_up:
        each()
    keywords = {"device": device} if _takes_device(fn) else {}

    def run_task(task: Chunk) -> Any:
        (item,) = task.leaves[0]
        try:
            with tf.device(device):
                return fn(item, **keywords)
        except BaseException as error:
            _add_note(error, task.on(device), item)
            raise

    context = copy_context()
    return lambda task: context.run(run_task, task)


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


def _add_note(error: BaseException, shard: Shard, item: Any) -> None:
    note = f"item {shard.start} on {short_name(shard.device)}"
    with suppress(Exception):  # reprlib fails for classes that have the name of a built-in one
        note += f": {reprlib.repr(item)}"
    add_note(error, note)
