"""The graph engine: one `tf.function` gives each device a shard of the rows and gathers the results. Differentiable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap._tensorflow.functions import in_xla_context
from devicemap._tensorflow.gradients import have_tangents
from devicemap.compile.call_spec import ANY_ORDER, CallSpec
from devicemap.compile.compiled import CompiledMap
from devicemap.compile.graph_builder import sizes_in_graph
from devicemap.compile.program import Program
from devicemap.compile.returned import with_static_rows
from devicemap.data.rows import HOST, Rows, count_rows
from devicemap.data.shards import check_inner_shapes
from devicemap.data.sources import Chunk, MemorySource
from devicemap.devices import is_out_of_memory
from devicemap.errors import DataError, DeviceMapError
from devicemap.events import ChunkFinished, ChunkStarted, Event, Shard
from devicemap.run.chunk_engine import run_chunks
from devicemap.run.retries import AGAIN_SECONDS
from devicemap.run.workers import Call, Runner


def shard_events(
    shards: Sequence[Shard], began: float, seconds: float, in_turn: bool, end_times: Any
) -> list[ChunkStarted | ChunkFinished]:
    """Return the start and the end of each shard of a graph that ran for `seconds`, sorted by time.

    `end_times`: the time at which the results of each shard arrived, float64 `[shards]` or longer, in seconds since the epoch
    like `began`; `None` for one shard, or without clocks. `in_turn`: whether each shard waited for the previous one.
    """
    started, ended = [0.0] * len(shards), [seconds] * len(shards)
    if end_times is not None:  # clipped, because the system clock may be set during the call
        ended = np.clip(np.asarray(end_times)[: len(shards)] - began, 0.0, seconds).tolist()
        if in_turn:
            ended = np.maximum.accumulate(ended).tolist()
            started = [0.0, *ended[:-1]]
    parts = zip(shards, started, ended)
    events = [event for s, a, b in parts for event in (ChunkStarted(a, s, 0.0), ChunkFinished(b, s, a))]
    return sorted(events, key=lambda event: event.seconds)  # stable: a start stays before its end


class CallObservers:
    """Observers of calls, for instance a report or a progress bar.

    This base class discards events. It resets the count of traces, so that the next report starts at 0.
    """

    def of_graph(
        self, rows: int, devices: Sequence[str], compiled: CompiledMap
    ) -> AbstractContextManager[Callable[[Callable[[], Iterable[Event]]], object]]:
        """Return the context of a call of `compiled` in one graph; its value takes a function that returns its events."""
        compiled.take_traces()
        return nullcontext(lambda events: None)

    def of_chunks(self, compiled: CompiledMap) -> AbstractContextManager[Callable[[Event], object]]:
        """Return the context of a call of `compiled` in chunks; its value takes each event, one at a time."""
        compiled.take_traces()
        return nullcontext(lambda event: None)


def run_graph(
    program: Program,
    compiled: CompiledMap,
    rows: Rows,
    gradient_order: int,
    observers: CallObservers,
    raise_out_of_memory: bool = False,
) -> Any:
    """Map over rows in eager code, in one graph with a shard per device.

    Args:
        program: the program of the call.
        compiled: its compiled map of the rows.
        rows: the data.
        gradient_order: the highest order of gradients that tapes may request, as in `CallSpec`.
        observers: observe the call.
        raise_out_of_memory: raise out-of-memory errors unchanged, because the caller handles them.

    Raises:
        FunctionError: `fn` failed. It names the device and the rows if they can be found.
    """
    if gradient_order and have_tangents([*compiled.flat(rows.leaves), *compiled.traced.captures]):
        raise DataError(
            "a tf.autodiff.ForwardAccumulator follows the data or a variable of fn, and a map over devices has no forward "
            "mode; use a tf.GradientTape"
        )
    count = rows.count or 0
    if not count and not gradient_order:
        with observers.of_graph(0, (), compiled):
            return compiled.pack_no_rows()
    shards, sizes = compiled.shards(count) if count else ((), tf.zeros([1], tf.int32))
    leaves = program.with_row_seeds(rows.leaves, 0, count)
    graph = compiled.graph(
        CallSpec.of_shards(max(len(shards), 1), gradient_order=gradient_order, empty_shards=not count)
    )
    devices = tuple(dict.fromkeys(shard.device for shard in shards))
    with observers.of_graph(count, devices, compiled) as finished:
        began, began_at = time.perf_counter(), time.time()
        try:
            if gradient_order:
                results, end_times = compiled.run_taped(graph, (sizes, *leaves), gradient_order)
            else:
                results, end_times = compiled.run(graph, (sizes, *leaves), count)
        except tf.errors.OpError as error:  # signal handlers raise other errors
            if not shards or (raise_out_of_memory and is_out_of_memory(error)):
                raise
            located = _located_error(program, error, compiled, leaves, shards, time.perf_counter() - began)
            raise located from located.__cause__
        if count:
            ends, seconds = end_times[0] if end_times else None, time.perf_counter() - began
            finished(partial(shard_events, shards, began_at, seconds, compiled.traced.audit.ordered, ends))
    return compiled.pack(results)


def _located_error(
    program: Program,
    error: Exception,
    compiled: CompiledMap,
    leaves: tuple[Any, ...],
    shards: Sequence[Shard],
    seconds: float,
) -> BaseException:
    """Return the error to raise for that of a graph that failed after `seconds`.

    TensorFlow does not report the device that failed. So the rows run again in chunks, whose results are discarded, unless
    that would write a variable again or take long. If `fn` takes rows and has no side effects, this finds the row, too.
    """
    repeats_rows = program.may_repeat(compiled)
    known = len(shards) < 2 and not repeats_rows
    if known or compiled.traced.audit.writes or seconds > AGAIN_SECONDS:
        return program.located_error(error, shards)
    cancellation = Cancellation()
    functions = compiled.chunk_functions(cancellation)

    def make_function(device: str) -> Callable[[Chunk], Any]:
        function = functions[device]()
        return lambda chunk: function(chunk.leaves, chunk.count)

    runners = [Runner(device, partial(make_function, device), compiled.slots.count(device)) for device in functions]
    call = Call(
        may_repeat=repeats_rows,
        located_error=program.located_error,
        cancel=cancellation.cancel,
        deadline=time.monotonic() + 2 * AGAIN_SECONDS,  # as long as the graph, and as long again to find the row
    )
    source = MemorySource(Rows(leaves, leaves, shards[-1].stop), max(map(len, shards)))
    try:
        for parts in zip(*(part for result in run_chunks(source, runners, call) for part in result.parts)):
            check_inner_shapes(parts)
    except DeviceMapError as found:
        return found.with_traceback(None)  # whose frames hold copies of variables
    except Empty:  # time is up
        pass
    return program.located_error(error, shards)


def call_in_function(program: Program, rows: Rows) -> Any:
    """Call a program in the function that is being traced, with a shard for each device."""
    compiled = program.compiled_for(rows)
    with tf.device(HOST):  # otherwise the placer would move rows and results through the first GPU
        count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
        leaves = program.with_row_seeds(rows.leaves, 0, count)
        engine = compiled.engine_inside()
        slots = 1 if in_xla_context() else len(compiled.slots)  # XLA compiles all shards for one device
        if rows.count:
            shards, sizes = compiled.shards(rows.count, slots)
            spec = CallSpec.of_shards(len(shards), engine, ANY_ORDER)
        else:  # an unknown number, or 0 rows, whose gradients are zeros
            spec = CallSpec.of_shards(slots, engine, ANY_ORDER, empty_shards=True)
            sizes = sizes_in_graph(count, slots)
        graph = compiled.graph(spec)
        results, _ = graph(sizes, *leaves)
        if compiled.traced.reduction is None:
            results = [with_static_rows(leaf, rows.count) for leaf in results]
        return compiled.pack(results)
