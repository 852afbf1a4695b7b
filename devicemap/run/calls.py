"""How rows travel from the user's data to the devices and back, in one of two ways.

    one graph   rows ── shards ──> a call per device, in one tf.function ──> gathered rows
    chunks      source ── take ──> a chunk ──> the first idle device's function ──> groups, in order ── join ──> rows

In-memory data goes through one graph: lowest cost per call, differentiable; where a call takes long, its devices take their
next rows in it as they are done with others. Datasets, data with a `batch_size`, the first call of a function that may take
long, and what does not fit at once go in chunks, each to the first idle device: balanced, in bounded memory, and surviving a
chunk that fails. Both take the same traced function, and the same copies of what it captures.
"""

from __future__ import annotations

import time
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
from devicemap.base.hosts import lost_among
from devicemap.compile.compiled import Compiled
from devicemap.compile.gather import check_row_counts
from devicemap.compile.program import Program
from devicemap.data.chunks import Chunk, InMemory, Source
from devicemap.data.datasets import from_dataset
from devicemap.data.join import join
from devicemap.data.pieces import COMPILING_SECONDS, balance_pays
from devicemap.data.rows import Rows, as_rows
from devicemap.errors import DataError, HostLostError, OptionError, brief, warn_user
from devicemap.events import ChunkFinished, DeviceLost, Event, short_name
from devicemap.run.capacity import in_flight
from devicemap.run.dispatch import Rules
from devicemap.run.embedded import call_inside
from devicemap.run.one_graph import GraphObservers, Heard, OneGraph
from devicemap.run.reorder import Group
from devicemap.run.schedule import Pace, reorder_window, take_as_long
from devicemap.run.workers import Runner, run_chunks

_TRIED_SECONDS = 0.3
"""A call that is expected to take no longer, balanced, is tried with a shard for each device, too."""


@dataclass
class _Known:
    """What is known of a compiled function: `parallel_map` makes calls anew, of programs that are remembered."""

    paces: dict[str, Pace] = field(default_factory=dict)
    """Of its devices, by chunks."""

    speeds: list[float] | None = None
    """Rows per second of its places, by the last long call: in chunks, those of the quickest chunk, as the first ones are
    compiled."""

    balanced: float | None = None
    """Seconds per row of the last call that balanced itself, but for the first, which is compiled."""

    in_shards: float | None = None
    """The same of the last call with a shard for each device."""

    doubtful: bool = False
    """Whether there was but a first call, which took long besides compiling: its fastest chunks may not speak for all rows."""

    promising: bool = False
    """Whether chunks of fewer rows took as long: then a shard for each device may take much less."""

    tried: bool = False
    """Whether there was such a call, which was compiled."""

    seconds: float = 0.0
    """How long it has worked in long calls."""

    most_rows: int | None = None
    """Fewer than have run out of memory at once."""

    def balance_pays(self, rows: int) -> bool:
        """Whether a call on so many rows had better balance itself, as far as known.

        A function may take as long for a few rows as for many, so that a shard for each device is quicker than pieces: where
        that costs little, it is tried.
        """
        balanced = rows * (self.balanced or 1 / max(sum(self.speeds or ()), 1e-9))
        if self.in_shards is None:
            return self.doubtful or (balanced > _TRIED_SECONDS and not self.promising)
        return balance_pays(rows, self.in_shards, balanced / rows)


_known: WeakKeyDictionary[Compiled, _Known] = WeakKeyDictionary()


class Observers(GraphObservers, Protocol):
    """Who hears of calls: a report, a progress bar, a callable of the user's."""

    def of_chunks(self, traces: Callable[[], int]) -> AbstractContextManager[Callable[[Event], object]]:
        """What a call in chunks runs in: it is told each event, one at a time."""


class Nobody:
    """Hears of no call."""

    def of_graph(
        self, rows: int, devices: Sequence[str], traces: Callable[[], int]
    ) -> AbstractContextManager[Heard | None]:
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
        self._one_graph = OneGraph(program, observers)

    def over(self, data: Any) -> Any:
        """All of the data, in eager code, in the way that the options ask for."""
        if isinstance(data, tf.data.Dataset):
            return self.in_chunks(data)
        rows = as_rows(data)
        return self._in_memory(rows) if self._options.batch_size is None else self.in_chunks(rows)

    def _in_memory(self, rows: Rows) -> Any:
        """Rows in eager code; where a host is lost, once more on the devices that are left."""
        compiled = self.program.compiled_for(rows)
        try:
            return self._in_one_way(rows, compiled)
        except (tf.errors.OpError, HostLostError) as error:
            if (lost := lost_among(compiled.devices)) is None:
                raise
            if not self._options.max_retries or compiled.traced.audit.writes:  # which would be written again
                raise lost from error
        return self._in_memory(rows)

    def _in_one_way(self, rows: Rows, compiled: Compiled) -> Any:
        """In one graph with a shard for each device if that is short, differentiated, or all there is; else balanced, in chunks
        at first, and in a graph of its own once that is worth compiling."""
        count = rows.count or 0
        gradients = compiled.order_of_gradients(rows.leaves)
        known = _known.setdefault(compiled, _Known())
        if gradients or not compiled.may_balance(count):
            return self._one_graph.in_shards(compiled, rows, gradients)
        if known.speeds is None or not self._fit(compiled, count):
            return self._balanced_in_chunks(compiled, rows)
        began, retried = time.perf_counter(), self._options.max_retries > 0
        try:
            if not known.balance_pays(count):
                results = self._one_graph.in_shards(compiled, rows, retried=retried)
                if known.tried:
                    known.in_shards = (time.perf_counter() - began) / count
                known.tried = True
                return results
            if known.seconds > COMPILING_SECONDS:
                results, known.speeds = self._one_graph.in_pieces(compiled, rows, known.speeds, retried)
                known.balanced = (time.perf_counter() - began) / count
                return results
        except tf.errors.OpError as error:
            if not retried or not is_out_of_memory(error):
                raise
            known.most_rows = count - 1
        return self._balanced_in_chunks(compiled, rows)

    def _fit(self, compiled: Compiled, rows: int) -> bool:
        """Whether so many rows at once have a chance to fit into the devices' memory."""
        known = _known[compiled]
        each = -(-rows // len(compiled.places))
        limits = (limit for pace in known.paces.values() for limit in (pace.limit, pace.room) if limit is not None)
        return rows <= (known.most_rows or rows) and each <= min(limits, default=each)

    def _balanced_in_chunks(self, compiled: Compiled, rows: Rows) -> Any:
        known, began, fastest = _known[compiled], time.perf_counter(), dict.fromkeys(compiled.devices, 0.0)
        chunks: list[tuple[int, float]] = []
        compiled_by: dict[str, float] = {}
        worked: list[float] = []

        def heard(event: Event) -> None:
            if isinstance(event, ChunkFinished):
                chunks.append((len(event.shard), max(event.seconds - event.started_seconds, 1e-9)))
                device, (count, seconds) = event.shard.device, chunks[-1]
                fastest[device] = max(fastest[device], count / seconds)
                if event.started_seconds >= compiled_by.setdefault(device, event.seconds):
                    worked.append(seconds)

        results = self._joined(InMemory(rows, None), compiled, heard)
        seconds = time.perf_counter() - began
        known.seconds += seconds
        known.doubtful = known.speeds is None and sum(worked) > _TRIED_SECONDS * len(compiled.devices)
        if known.speeds is not None:
            known.balanced = seconds / (rows.count or 1)
            known.promising = take_as_long(chunks)
        known.speeds = [fastest[place] / compiled.places.count(place) for place in compiled.places]
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

    def _joined(self, source: Source, compiled: Compiled, hear: Callable[[Event], None] = lambda event: None) -> Any:
        """The results of all chunks; `hear` is told each event of the call."""
        if compiled.traced.reduction is not None:
            groups = self.groups(source, compiled, Rules(window=self._window(compiled), observe=hear))
            return compiled.pack_states(state for group in groups for state in group.results)
        parts = [results for group in self.groups(source, compiled, Rules(observe=hear)) for results in group.results]
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
        return reorder_window(sum(in_flight(compiled, self._options.prefetch).values()))

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
        compiled, functions = self._functions(source, compiled, cancellation)
        paces = _known.setdefault(compiled, _Known()).paces
        runners = [
            Runner(device, partial(self._begin, compiled, functions[device], device, keep), at_once)
            for device, at_once in in_flight(compiled, self._options.prefetch).items()
        ]
        if sum(runner.in_flight for runner in runners) == 1:
            source.read_ahead()
        lost: list[DeviceLost] = []
        try:
            with self._observers.of_chunks(compiled.take_traces) as observe:

                def tell(event: Event) -> None:
                    if isinstance(event, DeviceLost):
                        lost.append(event)
                    hear(event)
                    observe(event)

                hear = rules.observe
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
            for what in dict.fromkeys(map(_told, lost)):
                warn_user(f"{self.program.name}: {what}", RuntimeWarning)

    def _functions(
        self, source: Source, compiled: Compiled, cancellation: Cancellation
    ) -> tuple[Compiled, dict[str, Callable[[], Callable[..., Any]]]]:
        """What gives each device's function, after what `fn` captures was brought there; where that tells that a host is lost,
        for those that are left."""
        while True:
            try:
                return compiled, compiled.functions(cancellation)
            except tf.errors.OpError as error:
                if (lost := lost_among(compiled.devices)) is None:
                    raise
                if not self._options.max_retries:
                    raise lost from error
            compiled = self.program.compiled_for(source)

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
        try:
            results: list[Any] = function(*compiled.flat(leaves))
        except Exception as error:
            if (lost := lost_among([device, self.program.output_device])) is not None:
                raise lost from error
            raise
        if self.program.counts_rows:
            returned = results[-1:] if compiled.traced.reduction else []  # states count theirs
            check_row_counts(results, returned, [chunk.on(device)])
        return results if keep is None else keep(chunk, results)


def _told(event: DeviceLost) -> str:
    """What a user should know; of a host the same for each of its devices."""
    if isinstance(event.error, HostLostError):
        return str(event.error)
    return (
        f"{short_name(event.device)} kept failing, and got no more chunks in this call. Its last error was "
        f"{type(event.error).__name__}: {brief(event.error)}"
    )
