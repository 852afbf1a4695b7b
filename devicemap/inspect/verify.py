"""`DeviceMap.verify`: run a function on some rows in three modes, and compare each with one device on all rows at once.

    "again"          the same call a second time
    "one by one"     one row per call
    "over devices"   the map itself

All modes run the same trace, so their results have the same structure and dtypes. Single rows run first: their time decides
how many rows are compared within the time limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap.compile.compiled import CompiledMap
from devicemap.compile.invoke import interruptible
from devicemap.compile.program import Program
from devicemap.data.join import join
from devicemap.data.rows import HOST, Rows, take_rows
from devicemap.data.sample import first_rows, rows_in_memory
from devicemap.data.structure import as_nodes, map_nest
from devicemap.errors import DeviceMapError, FunctionError, brief, warn_user
from devicemap.events import CallFinished, CallStarted, ChunkFinished, Event, Shard, short_name
from devicemap.inspect.differences import epsilon, find_difference, rounding_explains
from devicemap.inspect.progress import ProgressBar
from devicemap.inspect.render import Result, listed, page, seconds_text
from devicemap.options import check_count, check_number
from devicemap.run.mapper import Mapper, NullObserver

_LEAST_ROWS = 16
_ROWS_PER_DEVICE = 2

_MODES = "again", "one by one", "over devices"
"""In this order: a mode also differs for the reasons of the modes before it."""

_RUNS = len(_MODES) + 1
"""How often each row runs: in each mode, and at once."""

_SHOWN_SECONDS = 2.0
"""A verification that takes longer shows its progress."""

_MEANINGS = {
    "again": "The same rows give different results each time: fn draws random numbers, or reads state that changes. For random "
    "numbers, use the option seed= and tf.random.stateless_* ops. Pass other state as data",
    "one by one": "A row's result depends on the other rows of its batch, as with a mean over the batch or batch normalization "
    "in training mode. It changes with the number of devices and with batch_size. Use fixed statistics (training=False), or "
    "compute them in a first pass. A fn of one row needs vectorize=False",
    "over devices": "Several devices compute something else than one device. A result may depend on the number of rows, or "
    "kernels of different devices may round differently",
    "rounding": "Rounding changes the result of these rows, which do not depend on each other: other last digits in a row "
    "change its result as much. A branch, a comparison, an argmax or the number of steps of a loop depends on it",
}
"""The meaning of a difference."""


@dataclass(frozen=True)
class Finding:
    """One output that differs in one mode."""

    mode: str
    """`"again"`, `"one by one"` or `"over devices"`: the first mode in which the output differs. `"rounding"`: it
    differs in one of the last two because rounding changes a branch, a step count or the like."""

    output: str | None
    """The path of the output, as `the result['x']`; `None` if `fn` failed in this mode."""

    difference: str
    """The first difference: index, values, and how many numbers differ. If `fn` failed, the error."""

    meaning: str
    """The likely cause, and what to do."""

    def __str__(self) -> str:
        return f"{self.mode}: {self.difference}. {self.meaning}."


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """The result of `DeviceMap.verify`. `print(verification)` shows all of it."""

    _derived = ("ok",)

    name: str
    """Name of the function."""

    rows: int
    """Number of rows that were compared."""

    expected_rows: int
    """Number of rows to compare if time allows."""

    seconds: float
    """Duration, without the trace."""

    devices: tuple[str, ...]
    """Full names of the devices of the map."""

    findings: tuple[Finding, ...]
    """At most one per output and per mode that failed."""

    unfinished: tuple[str, ...]
    """Modes without a result when time was up. `"rounding"`: no time was left to test whether rounding explains a finding."""

    @property
    def ok(self) -> bool:
        """Whether the compared rows gave the same results in all modes, up to rounding. `False` if a mode is unfinished."""
        return not self.findings and not self.unfinished

    def __bool__(self) -> bool:
        raise TypeError("a Verification is neither true nor false: ask for verification.ok")

    @property
    def limited(self) -> str | None:
        """What the time limit left out; `None` for nothing."""
        if self.rows == self.expected_rows and not self.unfinished:
            return None
        checked = f"checked {self.rows} of {self.expected_rows} rows in {self.seconds:.3g} s"
        unfinished = f"; not finished: {listed(self.unfinished)}" if self.unfinished else ""
        return f"{checked}{unfinished}. Pass seconds=None to verify without a time limit."

    def __rich__(self) -> Any:
        answer = "the same results in all modes, up to rounding" if self.ok else "NOT the same results in all modes"
        if self.unfinished and not self.findings:
            answer = "NOT verified in all modes"
        title = f"{self.name}: {answer}; {self.rows} row(s) on {', '.join(map(short_name, self.devices))}"
        few = ["One row does not show whether rows depend on each other: verify more."] if self.rows == 1 else []
        return page(title, notes=[*map(str, self.findings), *([self.limited] if self.limited else few)])


def verify(
    program: Program, data: Any, rows: int | None, tolerance: float | None, seconds: float | None
) -> Verification:
    """Run a program on the first `rows` rows of `data` in each mode, and compare. See `DeviceMap.verify`."""
    if rows is not None:
        check_count("rows", rows)
    check_number("tolerance", tolerance)
    check_number("seconds", seconds)
    if not tf.executing_eagerly():
        raise DeviceMapError("verify was called inside a tf.function, which has no results to compare; call it outside")
    most = int(rows or max(_LEAST_ROWS, _ROWS_PER_DEVICE * len(program.devices)))
    some = rows_in_memory(data, program.options, most, most)
    runs = _Runs(program, program.compiled_for(some), some, math.inf if seconds is None else float(seconds))
    findings: list[Finding] = []
    try:
        with suppress(TimeoutError):
            runs.run_modes()
        unfinished = [mode for mode in _MODES if mode not in runs.results]
        try:
            findings.extend(_findings(runs, tolerance))
        except TimeoutError:
            unfinished.append("rounding")
    finally:
        runs.tell(CallFinished(runs.seconds, None))
    done = Verification(
        program.name, runs.compared, runs.count, runs.seconds, runs.devices, tuple(findings), tuple(unfinished)
    )
    if done.limited:
        warn_user(f"{program.name}: verify {done.limited}", RuntimeWarning)
    return done


class _Runs:
    """Runs of the first rows in each mode, until time is up."""

    def __init__(self, program: Program, compiled: CompiledMap, rows: Rows, limit: float):
        self.results: dict[str, list[Any] | Exception] = {}
        """By mode, the result leaves or the error of `fn`; "at once" is the first run of all rows on one device."""
        self.count, self.compared, self.devices = rows.count or 0, 0, compiled.devices
        self.leaves = program.seeded(rows.leaves, 0, rows.count)
        self.tell: Callable[[Event], object] = lambda event: None
        self.compiled, self._program, self._data, self._limit = compiled, program, rows, limit
        self._cancellation = Cancellation()
        self._function = compiled.chunk_functions(self._cancellation)[self.devices[0]]()
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the first run began."""
        return time.perf_counter() - self._began

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the results of rows, which run at once.

        Raises:
            TimeoutError: time is up.
        """
        call = partial(self._function, *self.compiled.flat(leaves))
        results: list[Any] = interruptible(call, self._cancellation, self._limit - self.seconds)
        return results

    def run_modes(self) -> None:
        """Run rows in each mode. Single rows come first: they show how many rows the time allows.

        Raises:
            TimeoutError: time is up.
            FunctionError: `fn` failed on all rows at once, or over the devices.
        """
        batched = self.compiled.traced.vectorized or self._program.options.batched
        parts = 3 if batched else _RUNS + 1  # a batch takes less time than its rows one by one
        alone: list[list[Any]] = []
        compiling = 0.0

        def one_by_one() -> list[Any]:
            nonlocal compiling
            while len(alone) < min(2, self.count) or (
                len(alone) < self.count and self.seconds - compiling < (self._limit - compiling) / parts
            ):
                alone.append(self._run_rows(len(alone), len(alone) + 1))
                if len(alone) == 1:
                    compiling = self.seconds
                    self._show(compiling * (self.count + _RUNS if batched else self.count * _RUNS))
            return [join(leaf) for leaf in zip(*alone)]

        self._try("one by one", one_by_one)
        rows = self.count if isinstance(self.results["one by one"], Exception) else len(alone)
        try:
            self.results["at once"] = self._run_rows(0, rows)
        except tf.errors.OpError as error:
            raise self._program.failed(error, [Shard(self.devices[0], 0, rows)]) from error
        self.compared = rows
        self._try("again", lambda: self._run_rows(0, rows))
        if self.seconds + compiling * len(self.devices) > self._limit:  # the map compiles fn for each device
            raise TimeoutError
        mapped = Mapper(self._program, NullObserver()).run(first_rows(self._data, rows).structure)
        self.results["over devices"] = tf.nest.flatten(as_nodes(mapped))

    def _run_rows(self, start: int, stop: int) -> list[Any]:
        with tf.device(HOST):
            rows = [take_rows(leaf, start, stop) for leaf in self.leaves]
        results = self.run(rows)
        self.tell(ChunkFinished(self.seconds, Shard(self.devices[0], start, stop), 0.0))
        return results

    def _try(self, mode: str, run: Callable[[], list[Any]]) -> None:
        try:
            self.results[mode] = run()
        except (tf.errors.OpError, FunctionError) as error:
            self.results[mode] = error

    def _show(self, expected_seconds: float) -> None:
        """Show a progress bar if that is worth it."""
        if expected_seconds > _SHOWN_SECONDS:
            expected = seconds_text(min(expected_seconds, self._limit))
            self.tell = ProgressBar(f"verify {self._program.name}, up to {expected}")
            self.tell(CallStarted(0.0, self.count * _RUNS, ()))


def _findings(runs: _Runs, tolerance: float | None) -> Iterator[Finding]:
    """Yield the modes that failed, and the first difference of each output.

    Raises:
        TimeoutError: time is up before it is known whether rounding explains the difference that was yielded last.
    """
    wanted = runs.results.get("at once")
    if not isinstance(wanted, list):
        return
    for mode, error in runs.results.items():
        if isinstance(error, Exception):
            yield Finding(mode, None, f"fn failed with {type(error).__name__}: {brief(error)}", _MEANINGS[mode])
    paths = tf.nest.flatten(map_nest(lambda _, path: path, runs.compiled.pack(wanted), "the result"))
    for i, (path, leaf) in enumerate(zip(paths, wanted)):
        relative = math.sqrt(epsilon(leaf.dtype, runs.devices)) if tolerance is None else tolerance
        for mode in _MODES:
            result = runs.results.get(mode)
            if isinstance(result, list) and (found := find_difference(path, result[i], leaf, relative)):
                try:
                    rounding = mode != "again" and rounding_explains(
                        runs.run, i, runs.leaves, result[i], leaf, relative, runs.devices
                    )
                except tf.errors.OpError:  # fn fails on rounded rows
                    rounding = False
                except TimeoutError:
                    yield Finding(mode, path, found, _MEANINGS[mode])
                    raise
                mode = "rounding" if rounding else mode
                yield Finding(mode, path, found, _MEANINGS[mode])
                break
