"""The chunk engine: a scheduler sends chunks to idle devices, and a generator yields the results.

Threads: the scheduler, the workers of each device, and the consumer, which runs the generator. They exchange messages through
queues; apart from these, they share only a flag that stops the call. Leaving the generator in any way ends the call: running
chunks are cancelled, and nothing more is read. An error that is not retried is raised as soon as it occurs, or after running
tasks (`Call.are_tasks`). An error of the source is raised after the rows before it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from devicemap.compile.invoke import join_threads, receive
from devicemap.data.sources import Source
from devicemap.errors import add_note, error_text
from devicemap.events import CallFinished, CallStarted
from devicemap.run.chunk_sizes import Throughput
from devicemap.run.scheduler import DELIVERED, Scheduler
from devicemap.run.workers import Call, ChunkResult, End, Runner


def run_chunks(
    source: Source, runners: Sequence[Runner], call: Call, throughput: dict[str, Throughput] | None = None
) -> Iterator[ChunkResult]:
    """Yield the results of all chunks of a source, which is closed at the end.

    `throughput` holds measurements of earlier calls, and is updated at the end.
    """
    measured = {} if throughput is None else throughput
    scheduler = Scheduler(call, source, runners, measured)
    thread = threading.Thread(target=scheduler.run, name="devicemap scheduler", daemon=True)
    error: BaseException | None = None

    def stop() -> None:
        call.stopped = True
        call.cancel()
        scheduler.close()
        # An observer or the garbage collector may close the generator in any of these threads.
        join_threads([thread])
        join_threads(scheduler.threads)  # all of them: the scheduler starts no more

    atexit.register(stop)  # a thread that runs TensorFlow when the interpreter ends would abort the process
    try:
        call.notify(CallStarted, rows=source.rows, devices=tuple(runner.device for runner in runners))
        thread.start()
        for result in _received(call):
            if call.window is not None:
                call.to_scheduler.put(DELIVERED)
            yield result
    except BaseException as raised:
        error = raised
        _note_failure(raised, scheduler.error)
        raise
    finally:
        atexit.unregister(stop)
        try:
            stop()
        finally:  # also after a second Ctrl-C
            source.close()
            measured.update(scheduler.throughput())
            try:
                call.notify(CallFinished, error=error)
            finally:
                error = None  # its traceback refers to this frame


def _note_failure(error: BaseException, failed: BaseException | None) -> None:
    """Note the error of a failed task, which waits for running tasks, on an error that ends the call first."""
    if failed is not None and failed is not error:
        for note in (f"a task failed before: {error_text(failed)}", *getattr(failed, "__notes__", [])):
            add_note(error, note)


def _received(call: Call) -> Iterator[ChunkResult]:
    """Yield the results of whole chunks, in the order of rows from a reorder buffer, or as they are complete."""
    incomplete: dict[int, ChunkResult] = {}
    buffer: dict[int, ChunkResult] = {}
    delivered, end = 0, None
    while end is None or delivered < end.chunks:
        message = receive(call.to_consumer, call.deadline)
        if isinstance(message, End):
            end = message
            continue
        if (result := joined(incomplete, message)) is None:
            continue
        if not call.deterministic:
            delivered += 1
            yield result
            continue
        buffer[result.number] = result
        while delivered in buffer:
            delivered += 1
            yield buffer.pop(delivered - 1)
    try:
        if end.error is not None:
            raise end.error
    finally:
        del end, message  # the traceback of the error refers to this frame


def joined(incomplete: dict[int, ChunkResult], result: ChunkResult) -> ChunkResult | None:
    """Add the results of some rows to those of their chunk. Return them when the chunk is complete."""
    known = incomplete.pop(result.number, None)
    if known is not None:
        known.results.update(result.results)
        result = replace(known, computed=known.computed + result.computed)
    if result.computed == result.count:
        return result
    incomplete[result.number] = result
    return None
