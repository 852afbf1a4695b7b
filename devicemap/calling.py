"""How rows travel from the user's data to the devices and back, in one of two ways.

    one graph   rows ── shards ──> a tower per place, in one tf.function ──> gathered rows
    chunks      source ── take ──> a chunk ──> the first idle device's function ──> groups, in order ── join ──> rows

In-memory data goes through one graph that holds all of it: lowest cost per call, differentiable. Datasets, and data with a
`batch_size`, go in chunks, each to the first idle device: balanced, in bounded memory, and surviving a chunk that fails.
Both take the same traced function, and the same copies of what it captures.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from devicemap.chunking import Chunk, InMemory, Source
from devicemap.datasets import Elements, from_dataset
from devicemap.dispatching import Rules
from devicemap.errors import DataError, OptionError, brief
from devicemap.execution import sizes_in_graph
from devicemap.fitting import first_paces
from devicemap.gathering import check_row_counts, join, with_row_counts_checked, with_static_rows
from devicemap.internals.gradients import have_tangents, tape_is_recording
from devicemap.internals.running import Cancellation
from devicemap.interruption import Signals
from devicemap.journal.digests import digest_rows
from devicemap.journal.encoding import describe_call, encode_leaves
from devicemap.journal.resuming import Unfinished, check_rows
from devicemap.journal.writing import open_journal
from devicemap.programs import Program
from devicemap.reordering import Group
from devicemap.reporting import GraphCall, ProgressBar, Recorder
from devicemap.rows import HOST, Rows, as_rows, count_rows
from devicemap.scheduling import reorder_window
from devicemap.streaming import Lane, run_chunks
from devicemap.towers import Towers
from devicemap.types import DeviceLost, Event, Shard, short_name

_NOBODY = nullcontext()


class Calls:
    """Calls of one program, and the last one that has finished."""

    def __init__(self, program: Program):
        self.program = program
        self.last: GraphCall | Recorder | None = None
        self._options = program.options

    def in_one_graph(self, rows: Rows) -> Any:
        """In-memory data, in eager code: one graph takes it to the devices and back."""
        towers = self.program.towers_for(rows)
        if not rows.count:
            with self._graph_call(towers, ()):
                return towers.pack(towers.traced.no_rows())
        gradients = towers.order_of_gradients(rows.leaves)
        shards, sizes = towers.shards(rows.count)
        arguments = (sizes, *self.program.seeded(rows.leaves, 0, rows.count))
        if gradients and have_tangents([*towers.flat(rows.leaves), *towers.traced.concrete.captured_inputs]):
            raise DataError(
                "a tf.autodiff.ForwardAccumulator follows the data or a variable of fn, and TensorArray, which gathers the "
                "rows, has no forward mode; use a tf.GradientTape"
            )
        graph = towers.graph(len(shards), gradients)
        with self._graph_call(towers, shards) as call:
            began = time.perf_counter()
            try:
                with towers.drawing_alone():
                    if gradients:
                        results, returned, arrivals = towers.run_taped(graph, arguments, rows.count, gradients)
                    else:
                        results, returned, arrivals = towers.run(graph, arguments, rows.count)
                if call is not None:
                    call.arrivals = arrivals
            except tf.errors.OpError as error:  # what a running graph raises; signal handlers raise other errors
                seconds = time.perf_counter() - began
                located, cause = self.program.located(error, towers, arguments[1:], shards, seconds)
                raise located from cause
            if self._options.batched:
                check_row_counts(results, returned, shards)
        return towers.pack(results)

    def inside_function(self, rows: Rows) -> Any:
        """In-memory data, inside the user's own `tf.function`: the same graph becomes a part of it."""
        if self._options.batch_size is not None:
            raise OptionError(
                f"batch_size={self._options.batch_size} inside a tf.function: chunks are handed out in eager code. Map "
                "outside of the tf.function, or leave batch_size out"
            )
        towers = self.program.towers_for(rows)
        if rows.count == 0:
            return towers.pack(towers.traced.no_rows())
        places = len(towers.places) if rows.count is None else len(towers.shards(rows.count)[0])
        one_row = rows.count is not None and rows.count < 2 * places
        graph = towers.graph(places, 2, any_rows=rows.count is None, inlined=True, one_row=one_row)
        with tf.device(HOST):  # else all that comes and goes would go by the first device
            count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
            sizes = sizes_in_graph(count, places) if rows.count is None else towers.shards(rows.count)[1]
            results, returned, _ = graph(sizes, *self.program.seeded(rows.leaves, 0, count))
            if self._options.batched:
                results = with_row_counts_checked(results, returned, sizes)
            return towers.pack([with_static_rows(leaf, rows.count) for leaf in results])

    def in_chunks(self, data: Any) -> Any:
        """Rows or a dataset, in eager code: each chunk goes to the first idle device, the results are joined in order."""
        source = self._source(data, "mapped")
        towers = self.program.towers_for(source)
        parts = [results for group in self._groups(source, towers, Rules()) for results in group.results]
        if not parts:
            return towers.pack(towers.traced.no_rows())
        return self._join(towers, parts)

    def stream(self, data: Any) -> Iterator[Any]:
        """The same as chunks come, with bounded memory."""
        source = self._source(data, "streamed", endless=True)
        towers = self.program.towers_for(source)
        window = reorder_window(sum(towers.in_flight(self._options.prefetch).values()))
        rules = Rules(window=window, deterministic=self._options.deterministic)

        def chunks() -> Iterator[Any]:
            for group in self._groups(source, towers, rules):
                chunk = self._join(towers, group.results)
                yield chunk if self._options.deterministic else (group.start, chunk)

        return chunks()

    def shape_of_stream(self, data: Any) -> tuple[Any, int | None]:
        """What `stream` yields, as a nest of `tf.TypeSpec`s (objects as nodes), and how many of them, where that is known."""
        source = self._source(data, "streamed", endless=True)
        towers = self.program.towers_for(source)
        spec = towers.traced.nest_of_specs
        count = None
        if source.rows is not None and source.batch_size is not None:
            count = -(-source.rows // source.batch_size)
        return spec if self._options.deterministic else (tf.TensorSpec([], tf.int64), spec), count

    def write(self, data: Any, directory: str | os.PathLike[str]) -> None:
        """Keep the results of all chunks that a directory does not hold yet."""
        in_memory = not isinstance(data, tf.data.Dataset)
        rows = as_rows(data) if in_memory else data
        source = self._source(rows, "written")
        towers = self.program.towers_for(source)
        chunk_rows = source.rows_of_first_batch() if isinstance(source, Elements) else None
        header = describe_call(
            towers.traced.nest_of_specs, source.specs, self._options, source.rows, chunk_rows, self.program.name
        )
        with (
            Signals(),
            open_journal(directory, header) as journal,
        ):  # a TimeoutError is an OSError: the disk's, it seems
            if in_memory:
                check_rows(rows, journal)
            missing = Unfinished(source, journal, compared=in_memory)

            def keep(chunk: Chunk, results: list[Any]) -> None:
                stop = chunk.start + chunk.count
                journal.append(chunk.start, stop, encode_leaves(results), digest_rows(chunk.leaves))

            for _ in self._groups(missing, towers, Rules(), keep):
                pass
            journal.finish(missing.rows_read)

    def _source(self, data: Any, what: str, endless: bool = False) -> Source:
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

    def _join(self, towers: Towers, parts: list[list[Any]]) -> Any:
        with tf.device(self.program.output_device):
            return towers.pack([join(leaves) for leaves in zip(*parts)])

    def _groups(
        self, source: Source, towers: Towers, rules: Rules, keep: Callable[[Chunk, list[Any]], None] | None = None
    ) -> Iterator[Group]:
        """The results of all chunks; where they are kept elsewhere, groups without results."""
        listeners = self._listeners()
        recorder = None
        if self._options.report:
            recorder = Recorder("chunks", towers.take_traces(), self.program.gpus)
            listeners = (recorder, *listeners)
        lost: list[DeviceLost] = []

        def tell(event: Event) -> None:
            if isinstance(event, DeviceLost):
                lost.append(event)
            for listener in listeners:
                listener(event)

        cancellation = Cancellation()
        functions = towers.functions(cancellation)
        if not towers.paces:
            towers.paces |= first_paces(towers.traced, towers.devices)
        lanes = [
            Lane(device, partial(self._run_chunk, towers, functions[device], device, keep), in_flight)
            for device, in_flight in towers.in_flight(self._options.prefetch).items()
        ]
        rules = replace(
            rules,
            max_retries=self._options.max_retries,
            observe=tell,
            describe=self.program.failed,
            cancel=cancellation.cancel,
        )
        try:
            with _NOBODY if recorder is None else recorder.meter:
                yield from run_chunks(source, lanes, rules, towers.paces)
        finally:
            if recorder is not None:
                self._keep(recorder)
            # Here, and not where it happened: a warning in a worker's thread comes from no line of the user's.
            for event in lost:
                warn_of_loss(self.program.name, event)

    def _run_chunk(
        self,
        towers: Towers,
        function: Callable[..., Any],
        device: str,
        keep: Callable[[Chunk, list[Any]], None] | None,
        chunk: Chunk,
    ) -> list[Any] | None:
        leaves = self.program.seeded(chunk.leaves, chunk.start, chunk.count)
        results: list[Any] = function(*towers.flat(leaves))
        if self._options.batched:
            check_row_counts(results, [], [chunk.on(device)])
        return results if keep is None else keep(chunk, results)

    def _graph_call(self, towers: Towers, shards: Sequence[Shard]) -> AbstractContextManager[GraphCall | None]:
        """What listens to a call in one graph, where somebody does."""
        listeners = self._listeners()
        if not self._options.report and not listeners:
            return _NOBODY
        keep = self._keep if self._options.report else None
        return GraphCall(shards, towers.traced.audit.ordered, towers.take_traces(), self.program.gpus, listeners, keep)

    def _listeners(self) -> tuple[Callable[[Event], object], ...]:
        """Who hears of a call besides its report."""
        progress = self._options.progress
        return (ProgressBar(self.program.name),) if progress is True else (progress,) if progress else ()

    def _keep(self, call: GraphCall | Recorder) -> None:
        self.last = call


def warn_of_loss(name: str, event: DeviceLost) -> None:
    """Warn the user, at the line that called devicemap, of a device that was set aside."""
    package = str(Path(__file__).parent)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"{name}: {short_name(event.device)} kept failing, and got no more chunks in this call. Its last error was "
        f"{type(event.error).__name__}: {brief(event.error)}",
        RuntimeWarning,
        stacklevel=level,
    )
