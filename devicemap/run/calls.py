"""How rows travel from the user's data to the devices and back, in one of two engines.

    one graph   rows ── shards ──> a call per device, in one tf.function ──> gathered rows
    chunks      source ── take ──> a chunk ──> the first idle device's function ──> groups, in order ── join ──> rows

The graph engine has the lowest cost per call and is differentiable. The chunk engine sends each chunk to the first idle device:
it balances load, bounds memory, and retries a chunk that fails. It takes datasets, data with a `batch_size`, and calls on data
in memory that take long (`choose_engine`). Both engines share the traced function and its copies of captured variables.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap._tensorflow.gradients import tape_is_recording
from devicemap.base.devices import is_out_of_memory
from devicemap.compile.compiled import Compiled
from devicemap.compile.gather import check_row_counts
from devicemap.compile.program import Program
from devicemap.data.chunks import Chunk, InMemory, Source
from devicemap.data.datasets import from_dataset
from devicemap.data.join import join
from devicemap.data.rows import Rows, as_rows
from devicemap.errors import DataError, OptionError, brief, warn_user
from devicemap.events import DeviceLost, Event, short_name
from devicemap.run.capacity import in_flight
from devicemap.run.dispatch import Rules
from devicemap.run.embedded import call_inside
from devicemap.run.one_graph import GraphObservers, Heard, OneGraph
from devicemap.run.reorder import Group
from devicemap.run.schedule import ROWS_PER_SLOT, WINDOW, Pace, are_free, choose_engine
from devicemap.run.workers import Runner, run_chunks

_UNMEASURED_CALLS = {"chunks": 2, "one graph": 1}
"""The first call with an engine compiles, and the second in chunks is the first that knows the speeds of the devices."""


@dataclass
class _CallStats:
    """Measurements of a compiled map, kept between calls."""

    paces: dict[str, Pace] = field(default_factory=dict)
    """Throughput of its devices in the chunk engine."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls with each engine."""

    seconds_per_row: dict[str, float] = field(default_factory=dict)
    """Wall time per row of the last measured call with each engine."""

    most_rows: int | None = None
    """More rows than this have run out of memory in one graph."""

    def add(self, engine: str, seconds_per_row: float) -> None:
        """Record a call."""
        self.calls[engine] += 1
        if self.calls[engine] > _UNMEASURED_CALLS[engine]:
            self.seconds_per_row[engine] = seconds_per_row


_stats: WeakKeyDictionary[Compiled, _CallStats] = WeakKeyDictionary()


class Observers(GraphObservers, Protocol):
    """Who hears of calls: a report, a progress bar, a callable of the user's."""

    def of_chunks(self, compiled: Compiled) -> AbstractContextManager[Callable[[Event], object]]:
        """Return the context of a call of `compiled` in chunks; its value takes each event, one at a time."""


class Nobody:
    """Hears of no call."""

    def of_graph(self, rows: int, devices: Sequence[str], compiled: Compiled) -> AbstractContextManager[Heard | None]:
        compiled.take_traces()  # they are not those of the next call
        return nullcontext()

    def of_chunks(self, compiled: Compiled) -> AbstractContextManager[Callable[[Event], object]]:
        compiled.take_traces()
        return nullcontext(lambda event: None)


class Calls:
    """Calls of one program."""

    def __init__(self, program: Program, observers: Observers):
        self.program = program
        self._observers = observers
        self._options = program.options
        self._one_graph = OneGraph(program, observers)

    def over(self, data: Any) -> Any:
        """All of the data, in eager code, in the way that the options ask for."""
        if isinstance(data, tf.data.Dataset):
            return self.in_chunks(data)
        rows = as_rows(data)
        return self._in_memory(rows) if self._options.batch_size is None else self.in_chunks(rows)

    def _in_memory(self, rows: Rows) -> Any:
        """Map rows in memory with the engine that suits them; a graph that runs out of memory continues in chunks."""
        compiled, count = self.program.compiled_for(rows), rows.count or 0
        stats = _stats.setdefault(compiled, _CallStats())
        gradients = compiled.order_of_gradients(rows.leaves)
        differentiable = gradients > 0 or not compiled.may_use_chunks
        slots, known, free = len(compiled.places), stats.seconds_per_row, are_free(stats.paces.values())
        engine = choose_engine(count, slots, differentiable, known.get("chunks"), known.get("one graph"), free)
        began = time.perf_counter()
        if engine == "one graph" and (differentiable or count <= (stats.most_rows or count)):
            retried = self._options.max_retries > 0 and not differentiable
            try:
                results = self._one_graph.in_shards(compiled, rows, gradients, retried)
            except tf.errors.OpError as error:
                if not (retried and is_out_of_memory(error)):
                    raise
                stats.most_rows = count - 1
            else:
                if count >= ROWS_PER_SLOT * slots:  # seconds per row of fewer rows are no measure for more
                    stats.add(engine, (time.perf_counter() - began) / count)
                return results
        results = self._joined(InMemory(rows, None), compiled)
        stats.add("chunks", (time.perf_counter() - began) / count)
        return results

    def inside_function(self, rows: Rows) -> Any:
        """In-memory data, inside the user's own `tf.function`."""
        if self._options.batch_size is not None:
            raise OptionError(
                f"batch_size={self._options.batch_size} inside a tf.function: chunks are handed out in eager code. Map "
                "outside of the tf.function, or leave batch_size out"
            )
        return call_inside(self.program, rows)

    def in_chunks(self, data: Any) -> Any:
        """Rows or a dataset, in eager code: each chunk goes to the first idle device, the results are joined in order."""
        source = self.source(data, "mapped")
        return self._joined(source, self.program.compiled_for(source))

    def _joined(self, source: Source, compiled: Compiled) -> Any:
        """Return the results of all chunks, joined or merged in order."""
        if compiled.traced.reduction is not None:
            groups = self.groups(source, compiled, Rules(window=self._window(compiled)))
            return compiled.pack_states(state for group in groups for state in group.results)
        parts = [results for group in self.groups(source, compiled, Rules()) for results in group.results]
        if not parts:
            return compiled.pack_no_rows()
        return self._join(compiled, parts)

    def stream(self, data: Any) -> Iterator[Any]:
        """The same as chunks come, with bounded memory."""
        source = self.source(data, "streamed", endless=True)
        compiled = self.program.compiled_for(source)
        rules = Rules(window=self._window(compiled), deterministic=self._options.deterministic)

        def chunks() -> Iterator[Any]:
            for group in self.groups(source, compiled, rules):
                chunk = self._join(compiled, group.results)
                yield chunk if self._options.deterministic else (group.start, chunk)

        return chunks()

    def _window(self, compiled: Compiled) -> int:
        """The most groups that are read and not delivered, where memory is bounded."""
        return WINDOW * sum(in_flight(compiled, self._options.prefetch).values())

    def shape_of_stream(self, data: Any) -> tuple[Any, int | None]:
        """What `stream` yields, as a nest of `tf.TypeSpec`s (objects as nodes), and how many of them, where that is known."""
        source = self.source(data, "streamed", endless=True)
        compiled = self.program.compiled_for(source)
        spec = compiled.traced.nest_of_specs
        count = None
        if source.rows is not None and source.batch_size is not None:
            count = -(-source.rows // source.batch_size)
        return spec if self._options.deterministic else (tf.TensorSpec([], tf.int64), spec), count

    def source(self, data: Any, what: str, endless: bool = False) -> Source:
        """Rows or a dataset, to be read chunk by chunk."""
        if not tf.executing_eagerly():
            raise DataError(
                f"data cannot be {what} chunk by chunk inside a tf.function; do it outside, or pass tensors and no batch_size"
            )
        if tape_is_recording():
            raise OptionError(
                "a GradientTape is recording, and gradients do not go through chunks: pass in-memory data without "
                "batch_size, or put the call into `with tape.stop_recording():` if you need none of it"
            )
        if not isinstance(data, tf.data.Dataset):
            size = self._options.batch_size
            return InMemory(data if isinstance(data, Rows) else as_rows(data), size if isinstance(size, int) else None)
        if not endless and data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise DataError(
                "the dataset is infinite, and its whole result would be too; take a part of it with .take(n), or map it as "
                "a stream"
            )
        return from_dataset(data, self._options)

    def _join(self, compiled: Compiled, parts: list[list[Any]]) -> Any:
        with tf.device(self.program.output_device):
            return compiled.pack([join(leaves) for leaves in zip(*parts)])

    def groups(
        self, source: Source, compiled: Compiled, rules: Rules, keep: Callable[[Chunk, list[Any]], None] | None = None
    ) -> Iterator[Group]:
        """The results of all chunks; where something `keep`s them, groups without results."""
        cancellation = Cancellation()
        functions = compiled.functions(cancellation)
        paces = _stats.setdefault(compiled, _CallStats()).paces
        runners = [
            Runner(device, partial(self._begin, compiled, functions[device], device, keep), at_once)
            for device, at_once in in_flight(compiled, self._options.prefetch).items()
        ]
        if sum(runner.in_flight for runner in runners) == 1:
            source.read_ahead()
        lost: list[DeviceLost] = []
        try:
            with self._observers.of_chunks(compiled) as observe:

                def tell(event: Event) -> None:
                    if isinstance(event, DeviceLost):
                        lost.append(event)
                    hear(event)
                    observe(event)

                hear = rules.observe
                rules = replace(
                    rules,
                    max_retries=self._options.max_retries,
                    few_sizes=compiled.traced.uncompiled is not None,
                    observe=tell,
                    describe=self.program.failed,
                    cancel=cancellation.cancel,
                )
                yield from run_chunks(source, runners, rules, paces)
        finally:
            # Here, and not where it happened: a warning in a worker's thread comes from no line of the user's.
            for what in dict.fromkeys(map(_told, lost)):
                warn_user(f"{self.program.name}: {what}", RuntimeWarning)

    def _begin(self, compiled: Compiled, built: Callable[[], Callable[..., Any]], *rest: Any) -> Callable[[Chunk], Any]:
        return partial(self._run_chunk, compiled, built(), *rest)

    def _run_chunk(
        self,
        compiled: Compiled,
        function: Callable[..., Any],
        device: str,
        keep: Callable[[Chunk, list[Any]], None] | None,
        chunk: Chunk,
    ) -> list[Any] | None:
        leaves = self.program.seeded(chunk.leaves, chunk.start, chunk.count)
        results: list[Any] = function(*compiled.flat(leaves))
        if self.program.counts_rows:
            returned = results[-1:] if compiled.traced.reduction else []  # states count theirs
            check_row_counts(results, returned, [chunk.on(device)])
        return results if keep is None else keep(chunk, results)


def _told(event: DeviceLost) -> str:
    """The warning for a device that was set aside."""
    return (
        f"{short_name(event.device)} kept failing, and got no more chunks in this call. Its last error was "
        f"{type(event.error).__name__}: {brief(event.error)}"
    )
