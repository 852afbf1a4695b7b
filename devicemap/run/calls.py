"""How rows travel from the user's data to the devices and back, in one of two ways.

    one graph   rows ── shards ──> a call per device, in one tf.function ──> gathered rows
    chunks      source ── take ──> a chunk ──> the first idle device's function ──> groups, in order ── join ──> rows

In-memory data goes through one graph that holds all of it: lowest cost per call, differentiable. Datasets, and data with a
`batch_size`, go in chunks, each to the first idle device: balanced, in bounded memory, and surviving a chunk that fails.
Both take the same traced function, and the same copies of what it captures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap._tensorflow.gradients import have_tangents, tape_is_recording
from devicemap.compile.compiled import Compiled
from devicemap.compile.gather import check_row_counts, with_row_counts_checked, with_static_rows
from devicemap.compile.layout import sizes_in_graph
from devicemap.compile.program import Program
from devicemap.data.chunks import Chunk, InMemory, Source
from devicemap.data.datasets import from_dataset
from devicemap.data.join import join
from devicemap.data.rows import HOST, Rows, as_rows, count_rows
from devicemap.errors import DataError, OptionError, brief, warn_user
from devicemap.events import DeviceLost, Event, Shard, short_name
from devicemap.run.capacity import first_paces, in_flight
from devicemap.run.dispatch import Rules
from devicemap.run.reorder import Group
from devicemap.run.schedule import Pace, reorder_window
from devicemap.run.workers import Runner, run_chunks

_paces: WeakKeyDictionary[Compiled, dict[str, Pace]] = WeakKeyDictionary()
"""What is known of the devices of each: `parallel_map` makes calls anew, of programs that are remembered."""


class Timed(Protocol):
    """A call in one graph, as who hears of it knows it."""

    arrivals: Sequence[Any]
    """Set by whoever runs the graph: one tensor, float64 `[shards]`, when the results of each shard were there, in seconds
    since the epoch; or none, where the graph does not tell."""


class Observers(Protocol):
    """Who hears of calls: a report, a progress bar, a callable of the user's."""

    def of_graph(
        self, shards: Sequence[Shard], in_turn: bool, traces: Callable[[], int]
    ) -> AbstractContextManager[Timed | None]:
        """What a call in one graph runs in; `None` where nobody hears of it.

        `in_turn`: whether each shard waits for the one before it. `traces()`: how often `fn` was traced for the call.
        """

    def of_chunks(self, traces: Callable[[], int]) -> AbstractContextManager[Callable[[Event], object]]:
        """What a call in chunks runs in: it is told each event, one at a time."""


class Nobody:
    """Hears of no call."""

    def of_graph(
        self, shards: Sequence[Shard], in_turn: bool, traces: Callable[[], int]
    ) -> AbstractContextManager[Timed | None]:
        traces()  # they are not those of the next call
        return nullcontext()

    def of_chunks(self, traces: Callable[[], int]) -> AbstractContextManager[Callable[[Event], object]]:
        traces()
        return nullcontext(lambda event: None)


class Calls:
    """Calls of one program."""

    def __init__(self, program: Program, observers: Observers):
        self.program = program
        self._observers = observers
        self._options = program.options

    def over(self, data: Any) -> Any:
        """All of the data, in eager code, in the way that the options ask for."""
        if isinstance(data, tf.data.Dataset):
            return self.in_chunks(data)
        rows = as_rows(data)
        return self.in_one_graph(rows) if self._options.batch_size is None else self.in_chunks(rows)

    def in_one_graph(self, rows: Rows) -> Any:
        """In-memory data, in eager code: one graph takes it to the devices and back."""
        compiled = self.program.compiled_for(rows)
        if not rows.count:
            with self._observed(compiled, ()):
                return compiled.pack(compiled.traced.no_rows())
        gradients = compiled.order_of_gradients(rows.leaves)
        shards, sizes = compiled.shards(rows.count)
        arguments = (sizes, *self.program.seeded(rows.leaves, 0, rows.count))
        if gradients and have_tangents([*compiled.flat(rows.leaves), *compiled.traced.concrete.captured_inputs]):
            raise DataError(
                "a tf.autodiff.ForwardAccumulator follows the data or a variable of fn, and TensorArray, which gathers the "
                "rows, has no forward mode; use a tf.GradientTape"
            )
        graph = compiled.graph(len(shards), gradients)
        with self._observed(compiled, shards) as call:
            began = time.perf_counter()
            try:
                with compiled.drawing_alone():
                    if gradients:
                        results, returned, arrivals = compiled.run_taped(graph, arguments, rows.count, gradients)
                    else:
                        results, returned, arrivals = compiled.run(graph, arguments, rows.count)
                if call is not None:
                    call.arrivals = arrivals
            except tf.errors.OpError as error:  # what a running graph raises; signal handlers raise other errors
                seconds = time.perf_counter() - began
                located, cause = self.program.located(error, compiled, arguments[1:], shards, seconds)
                raise located from cause
            if self._options.batched:
                check_row_counts(results, returned, shards)
        return compiled.pack(results)

    def inside_function(self, rows: Rows) -> Any:
        """In-memory data, inside the user's own `tf.function`: the same graph becomes a part of it."""
        if self._options.batch_size is not None:
            raise OptionError(
                f"batch_size={self._options.batch_size} inside a tf.function: chunks are handed out in eager code. Map "
                "outside of the tf.function, or leave batch_size out"
            )
        compiled = self.program.compiled_for(rows)
        if rows.count == 0:
            return compiled.pack(compiled.traced.no_rows())
        places = len(compiled.places) if rows.count is None else len(compiled.shards(rows.count)[0])
        one_row = rows.count is not None and rows.count < 2 * places
        graph = compiled.graph(places, 2, any_rows=rows.count is None, inlined=True, one_row=one_row)
        with tf.device(HOST):  # else all that comes and goes would go by the first device
            count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
            sizes = sizes_in_graph(count, places) if rows.count is None else compiled.shards(rows.count)[1]
            results, returned, _ = graph(sizes, *self.program.seeded(rows.leaves, 0, count))
            if self._options.batched:
                results = with_row_counts_checked(results, returned, sizes)
            return compiled.pack([with_static_rows(leaf, rows.count) for leaf in results])

    def in_chunks(self, data: Any) -> Any:
        """Rows or a dataset, in eager code: each chunk goes to the first idle device, the results are joined in order."""
        source = self.source(data, "mapped")
        compiled = self.program.compiled_for(source)
        parts = [results for group in self.groups(source, compiled, Rules()) for results in group.results]
        if not parts:
            return compiled.pack(compiled.traced.no_rows())
        return self._join(compiled, parts)

    def stream(self, data: Any) -> Iterator[Any]:
        """The same as chunks come, with bounded memory."""
        source = self.source(data, "streamed", endless=True)
        compiled = self.program.compiled_for(source)
        window = reorder_window(sum(in_flight(compiled, self._options.prefetch).values()))
        rules = Rules(window=window, deterministic=self._options.deterministic)

        def chunks() -> Iterator[Any]:
            for group in self.groups(source, compiled, rules):
                chunk = self._join(compiled, group.results)
                yield chunk if self._options.deterministic else (group.start, chunk)

        return chunks()

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

    def _observed(self, compiled: Compiled, shards: Sequence[Shard]) -> AbstractContextManager[Timed | None]:
        return self._observers.of_graph(shards, compiled.traced.audit.ordered, compiled.take_traces)

    def groups(
        self, source: Source, compiled: Compiled, rules: Rules, keep: Callable[[Chunk, list[Any]], None] | None = None
    ) -> Iterator[Group]:
        """The results of all chunks; where something `keep`s them, groups without results."""
        cancellation = Cancellation()
        functions = compiled.functions(cancellation)
        paces = _paces.setdefault(compiled, {})
        if not paces:
            paces |= first_paces(compiled.traced, compiled.devices)
        runners = [
            Runner(device, partial(self._run_chunk, compiled, functions[device], device, keep), at_once)
            for device, at_once in in_flight(compiled, self._options.prefetch).items()
        ]
        lost: list[DeviceLost] = []
        try:
            with self._observers.of_chunks(compiled.take_traces) as observe:

                def tell(event: Event) -> None:
                    if isinstance(event, DeviceLost):
                        lost.append(event)
                    observe(event)

                rules = replace(
                    rules,
                    max_retries=self._options.max_retries,
                    observe=tell,
                    describe=self.program.failed,
                    cancel=cancellation.cancel,
                )
                yield from run_chunks(source, runners, rules, paces)
        finally:
            # Here, and not where it happened: a warning in a worker's thread comes from no line of the user's.
            for event in lost:
                warn_user(
                    f"{self.program.name}: {short_name(event.device)} kept failing, and got no more chunks in this call. Its "
                    f"last error was {type(event.error).__name__}: {brief(event.error)}",
                    RuntimeWarning,
                )

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
        if self._options.batched:
            check_row_counts(results, [], [chunk.on(device)])
        return results if keep is None else keep(chunk, results)
