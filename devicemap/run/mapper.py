"""The path of rows from the user's data to the devices and back, in one of two engines.

    one graph   rows ── shards ──> a call per device, in one tf.function ──> gathered rows
    chunks      source ── chunks ──> the first idle device's function ──> reorder buffer ── join ──> rows

The graph engine has the lowest cost per call and is differentiable. The chunk engine sends each chunk to the first idle
device. It balances load, bounds memory, and retries chunks that fail. It runs streams, `write`, calls on datasets, calls
with a `batch_size` or `on_error="skip"`, and long calls on data in memory (`choose_engine`). Both engines share the traced
function.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from typing import Any, Literal
from weakref import WeakKeyDictionary

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap._tensorflow.gradients import tape_is_recording
from devicemap.compile.compiled import ChunkFunction, CompiledMap
from devicemap.compile.hints import is_model_of
from devicemap.compile.program import Program
from devicemap.compile.reduction import Reduction
from devicemap.data.rows import Rows, as_rows
from devicemap.data.shards import join
from devicemap.data.sources import Chunk, MemorySource, Source, from_dataset
from devicemap.data.structure import as_nodes
from devicemap.devices import is_out_of_memory, kind_of, task_device
from devicemap.errors import DataError, DeviceMapError, FunctionError, OptionError, warn_user
from devicemap.events import Shard
from devicemap.run.chunk_engine import run_chunks
from devicemap.run.chunk_sizes import chunks_in_flight
from devicemap.run.engine import CallStats, choose_engine
from devicemap.run.graph_engine import CallObservers, call_in_function, run_graph
from devicemap.run.workers import Call, ChunkResult, Runner

_WINDOW = 4
"""The window, in multiples of the chunks in flight. It is larger than 1, so that a slow chunk does not stop the others."""


_stats: WeakKeyDictionary[CompiledMap, CallStats] = WeakKeyDictionary()


class Mapper:
    """Calls of one program."""

    def __init__(self, program: Program, observers: CallObservers):
        self.program = program
        self._observers = observers
        self._options = program.options

    def reducing(self, reduction: Reduction) -> Mapper:
        """Return the same mapper with its results reduced."""
        return Mapper(self.program.reducing(reduction), self._observers)

    @tf.autograph.experimental.do_not_convert  # tracing converts `fn` itself
    def run(self, data: Any) -> Any:
        """Map over all of the data, in eager code or inside the user's own `tf.function`."""
        if not tf.executing_eagerly():
            try:
                return self._inside_function(data)
            except DeviceMapError as error:  # autograph's message has all lines of the traceback
                raise error.with_traceback(None) from error.__cause__
        # In the scope of a remote device, such as that of a task, TensorFlow returns handles that cannot be read.
        with tf.device(None) if task_device.get() else nullcontext():
            if isinstance(data, tf.data.Dataset):
                return self._in_chunks(data)
            rows = as_rows(data)
            return self._in_chunks(rows) if self._options.needs_chunks else self._in_memory(rows)

    def _in_memory(self, rows: Rows) -> Any:
        """Map rows in memory with the chosen engine. A graph that runs out of memory continues in chunks."""
        compiled, count = self.program.compiled_for(rows), rows.count or 0
        stats = _stats.setdefault(compiled, CallStats())
        gradient_order = compiled.order_of_gradients(rows.leaves)
        one_graph_only = gradient_order > 0 or not compiled.may_use_chunks
        if one_graph_only or choose_engine(count, len(compiled.slots), stats) == "one graph":
            retried = self._options.max_retries > 0 and not one_graph_only
            try:
                with stats.measuring("one graph", count, len(compiled.slots)):
                    return run_graph(self.program, compiled, rows, gradient_order, self._observers, retried)
            except tf.errors.OpError as error:
                if not (retried and is_out_of_memory(error)):
                    raise
                stats.most_rows = count - 1
        with stats.measuring("chunks", count, len(compiled.slots)):
            return self._collect(MemorySource(rows, None), compiled)

    def _inside_function(self, data: Any) -> Any:
        """Map over data in memory, inside the user's own `tf.function`."""
        if isinstance(data, tf.data.Dataset):
            self.source(data, "mapped")  # raises the error
        rows = as_rows(data)
        if self._options.skips:
            raise OptionError(
                "on_error='skip' inside a tf.function, where a failing row ends the call: map outside of the tf.function, or "
                "leave on_error out"
            )
        if self._options.batch_size is not None:
            raise OptionError(
                f"batch_size={self._options.batch_size} inside a tf.function or Dataset.map: chunks need eager code. Map "
                "outside of it (DeviceMap.as_dataset returns a dataset), or leave batch_size out"
            )
        return call_in_function(self.program, rows)

    def _in_chunks(self, data: Any) -> Any:
        """Map over rows or a dataset in chunks, in eager code, and join the results in order."""
        source = self.source(data, "mapped")
        return self._collect(source, self.program.compiled_for(source))

    def _collect(self, source: Source, compiled: CompiledMap) -> Any:
        """Map over a source in chunks, and return the results of all chunks, joined or merged in order."""
        if compiled.traced.reduction is not None:
            with closing(self.chunks(source, compiled, window=self._window(compiled))) as results:
                return compiled.pack_states(state for result in results for state in result.parts)
        parts = [part for result in self.chunks(source, compiled) for part in result.parts]
        return self._join(compiled, parts) if parts else compiled.pack_no_rows()

    @tf.autograph.experimental.do_not_convert
    def stream(self, data: Any) -> Generator[Any]:
        """Yield the results of chunks, with bounded memory."""
        source = self.source(data, "streamed")
        compiled, in_order = self.program.compiled_for(source), self._options.deterministic

        def chunks() -> Generator[Any]:
            for result in self.chunks(source, compiled, window=self._window(compiled), deterministic=in_order):
                if not result.parts:  # all of its rows failed
                    continue
                chunk = self._join(compiled, result.parts)
                yield chunk if in_order else (result.start, chunk)

        return chunks()

    def _window(self, compiled: CompiledMap) -> int:
        """Return the largest number of chunks that are read and not delivered, if memory is bounded."""
        return _WINDOW * sum(in_flight(compiled, self._options.prefetch).values())

    def shape_of_stream(self, data: Any) -> tuple[Any, int | None]:
        """Return the nest of `tf.TypeSpec`s that `stream` yields (objects as nodes), and the number of chunks if known."""
        source = self.source(data, "streamed")
        spec = self.program.compiled_for(source).traced.nest_of_specs
        count = None
        if source.rows is not None and source.chunk_rows is not None and not self._options.skips:
            count = -(-source.rows // source.chunk_rows)
        return spec if self._options.deterministic else (tf.TensorSpec([], tf.int64), spec), count

    def source(self, data: Any, use: Literal["mapped", "streamed", "written"]) -> Source:
        """Return rows or a dataset as a source of chunks. Only a stream may be endless."""
        if not tf.executing_eagerly():
            instead = ", or pass tensors and no batch_size" if use == "mapped" else ""
            raise DataError(f"data cannot be {use} chunk by chunk inside a tf.function; do it outside{instead}")
        if tape_is_recording():
            instead = "pass in-memory data without batch_size and on_error, or " if use == "mapped" else ""
            raise OptionError(
                f"a GradientTape is recording, and gradients do not go through chunks: {instead}put the call into `with "
                "tape.stop_recording():` if you need no gradients"
            )
        if not isinstance(data, tf.data.Dataset):
            return MemorySource(data if isinstance(data, Rows) else as_rows(data), self._options.chunk_rows)
        if use != "streamed" and data.cardinality() == tf.data.INFINITE_CARDINALITY:
            instead = "" if self.program.reduction else ", or map it as a stream"
            raise DataError(
                f"the dataset is infinite, so the call would not end; take a part of it with .take(n){instead}"
            )
        source = from_dataset(data, self._options)
        if not self._options.batched and is_model_of(self.program.fn, as_nodes(data.element_spec)):
            warn_user(
                f"{self.program.name}: each element of the dataset is a batch for this model, but counts as one row. Set "
                "batched=True to map the rows of batches",
            )
        return source

    def _join(self, compiled: CompiledMap, parts: list[list[Any]]) -> Any:
        with tf.device(self.program.output_device):
            return compiled.pack([join(leaves) for leaves in zip(*parts)])

    def chunks(
        self,
        source: Source,
        compiled: CompiledMap,
        *,
        window: int | None = None,
        deterministic: bool = True,
        keep: Callable[[Chunk, list[Any]], None] | None = None,
        leave_out: Callable[[Chunk, Shard, BaseException], object] = lambda row, shard, error: None,
    ) -> Generator[ChunkResult]:
        """Yield the results of all chunks.

        Args:
            source: the chunks.
            compiled: the function for their specs.
            window: the most chunks that are read and not delivered; `None`: any number.
            deterministic: whether chunks are delivered in input order, or as they finish.
            keep: callback of a worker for a chunk and its results, which are then not yielded.
            leave_out: callback of a worker for a row that is left out: the row as a chunk, its device and its error.
        """
        try:
            yield from self._chunks(source, compiled, window, deterministic, keep, leave_out)
        except (FunctionError, KeyboardInterrupt) as error:  # other errors show lines of the user's code
            raise error.with_traceback(None) from error.__cause__

    def _chunks(
        self,
        source: Source,
        compiled: CompiledMap,
        window: int | None,
        deterministic: bool,
        keep: Callable[[Chunk, list[Any]], None] | None,
        leave_out: Callable[[Chunk, Shard, BaseException], object],
    ) -> Generator[ChunkResult]:
        """Yield the results of all chunks, as `chunks`. Its frame holds copies of variables."""
        cancellation = Cancellation()
        functions = compiled.chunk_functions(cancellation)
        runners = [
            self._runner(compiled, device, functions[device], most, keep)
            for device, most in in_flight(compiled, self._options.prefetch).items()
        ]
        with self._observers.of_chunks(compiled) as observe:
            call = Call(
                window=window,
                deterministic=deterministic,
                max_retries=self._options.max_retries,
                skips=self._options.skips,
                leave_out=leave_out,
                may_repeat=self.program.may_repeat(compiled),
                observe=observe,
                located_error=self.program.located_error,
                cancel=cancellation.cancel,
            )
            throughput = _stats.setdefault(compiled, CallStats()).throughput
            yield from run_chunks(source, runners, call, throughput)

    def _runner(
        self,
        compiled: CompiledMap,
        device: str,
        build: Callable[[], ChunkFunction],
        most: int,
        keep: Callable[[Chunk, list[Any]], None] | None,
    ) -> Runner:
        def make_function() -> Callable[[Chunk], Any]:
            function = build()

            def run(chunk: Chunk) -> Any:
                leaves = self.program.with_row_seeds(chunk.leaves, chunk.start, chunk.count)
                results = function(leaves, chunk.count)
                return results if keep is None else keep(chunk, results)

            return run

        return Runner(device, make_function, most)


def in_flight(compiled: CompiledMap, prefetch: int | None) -> dict[str, int]:
    """Return the largest number of chunks in flight on each device: one in total if `fn` depends on their order."""
    audit = compiled.traced.audit
    if audit.ordered:
        return {compiled.slots[0]: 1}
    # Two chunks on one device would draw from one seed; each call of Python occupies a thread.
    if audit.advances_seed or audit.python_ops:
        return dict.fromkeys(compiled.slots, 1)
    return {
        device: prefetch or max(chunks_in_flight(kind_of(device)), compiled.slots.count(device))
        for device in compiled.devices
    }
