"""Calls that store results in a directory. They compare the rows of finished chunks, and compute the other rows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorflow as tf

from devicemap.compile.audit import op_types
from devicemap.compile.compiled import CompiledMap
from devicemap.data.rows import HOST, Rows, as_rows
from devicemap.data.shards import join
from devicemap.data.sources import Chunk, DatasetSource, Source
from devicemap.errors import FunctionError, JournalError, MissingRowsError, OptionError, error_text, warn_user
from devicemap.events import Shard
from devicemap.run.mapper import Mapper
from devicemap.store.database import Header, StoredChunk, open_database, open_for_writing
from devicemap.store.encoding import START_AGAIN, describe_nest, digest, encode_leaves
from devicemap.store.fingerprint import fingerprint


@tf.autograph.experimental.do_not_convert
def write(
    mapper: Mapper,
    data: Any,
    directory: str | os.PathLike[str],
    trust_function: bool = False,
    retry_failed: bool = False,
) -> tuple[CompiledMap, list[StoredChunk], Path]:
    """Compute and store the chunks that a directory does not hold. The arguments are those of `DeviceMap.write`.

    Returns the compiled map, the rows that failed before and do not run again, and the absolute path of the directory.
    """
    if not isinstance(directory, str | os.PathLike) or isinstance(os.fspath(directory), bytes):
        raise OptionError(f"directory={directory!r:.80}; expected a path, after the data")
    directory = Path(directory)
    rows = data if isinstance(data, tf.data.Dataset) else as_rows(data)
    source = mapper.source(rows, "written")
    compiled = mapper.program.compiled_for(source)
    call, uncovered = _describe_call(mapper, source, compiled)
    absolute = directory.absolute()  # an observer may change the working directory
    with open_for_writing(directory) as writer:
        total = 0
        if writer.header is not None and writer.stored:
            known = _with_longer_batches(writer.header, call)
            _check_same_call(directory, known, call, trust_function)
            call, total = known, writer.header.rows or writer.stored[-1].stop
            if uncovered:
                warn_user(
                    f"{mapper.program.name} uses {' and '.join(uncovered)}: if these changed, the results in {directory} are "
                    "old, which devicemap does not detect",
                )
        keeps_failed = mapper.program.options.skips and not retry_failed
        stored = [chunk for chunk in writer.stored if chunk.error is None or keeps_failed]
        _check_total(total, source.rows, directory)
        if isinstance(rows, Rows):
            every = Chunk(0, rows.count or 0, rows.leaves)
            for chunk in stored:
                _check_same_rows(chunk, [every.cut(chunk.start, chunk.stop)], directory)
        whole = []
        for chunk in stored:  # each chunk is read once, at the speed of the disk
            with suppress(MissingRowsError):
                if chunk.error is None:
                    writer.leaves(chunk, compiled.traced.specs, None if compiled.traced.reduction is None else 1)
                whole.append(chunk)
        missing, header = UnfinishedRows(source, whole, total, directory), Header(call, source.rows)

        def keep(chunk: Chunk, results: list[Any]) -> None:
            finished = StoredChunk(chunk.start, chunk.start + chunk.count, digest(chunk.leaves))
            writer.put(header, (finished, encode_leaves(results)))

        def leave_out(row: Chunk, shard: Shard, error: BaseException) -> None:
            inputs, text = digest(row.leaves), error_text(error)
            writer.put(header, (StoredChunk(row.start, row.start + 1, inputs, device=shard.device, error=text), ()))

        # This thread commits, so that devices do not wait for the disk. Chunks that finish during a commit are in the next one.
        begins_again = [*_begins_again(compiled, directory)] if writer.stored else []
        for _ in mapper.chunks(missing, compiled, deterministic=False, keep=keep, leave_out=leave_out):
            writer.flush()
            while begins_again:
                warn_user(f"{mapper.program.name} {begins_again.pop()}")
        writer.put(header._replace(rows=missing.rows_read))
    return compiled, [chunk for chunk in stored if chunk.error is not None], absolute


@tf.autograph.experimental.do_not_convert
def reduce(mapper: Mapper, data: Any, directory: str | os.PathLike[str]) -> Any:
    """Compute and store the states of the chunks that a directory does not hold, and return the result of all states."""
    compiled, left_out, absolute = write(mapper, data, directory)
    if left_out:
        warn_user(
            f"{mapper.program.name}: {len(left_out)} row(s) failed in earlier runs and are left out; the first: row "
            f"{left_out[0].start}: {left_out[0].error}. Without on_error='skip' they are computed again",
        )
    with open_database(absolute) as database:
        finished = (chunk for chunk in database.contents()[1] if chunk.error is None)
        return compiled.pack_states(database.leaves(chunk, compiled.traced.specs, 1) for chunk in finished)


def _describe_call(mapper: Mapper, source: Source, compiled: CompiledMap) -> tuple[dict[str, Any], list[str]]:
    """Describe the call, as far as its results depend on it, as JSON; and name the parts that the description omits."""
    options, reduction = mapper.program.options, compiled.traced.reduction
    function, uncovered = fingerprint(compiled.traced)
    call = {
        "results": describe_nest(compiled.traced.nest_of_specs),
        "inputs": describe_nest(source.specs),
        "batched": options.batched,
        "batch_size": options.batch_size,
        "chunk_rows": source.rows_of_first_batch() if isinstance(source, DatasetSource) else None,
        "seed": None if options.seed is None else int(options.seed),
        "reducer": [*reduction.names] if reduction is not None else None,
        **function,
        "tensorflow": tf.__version__,
        "name": mapper.program.name,
    }
    return json.loads(json.dumps(call)), uncovered


def _with_longer_batches(there: Header, here: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a stored call. If its only batch was smaller than the first one now, it gets that size."""
    before, now = there.call.get("chunk_rows"), here["chunk_rows"]
    if before and now and before < now and there.rows == before:
        return there.call | {"chunk_rows": now}
    return there.call


def _begins_again(compiled: CompiledMap, directory: Path) -> Iterator[str]:
    """Describe the state that changes the results of a function, and that a directory does not hold."""
    concrete, audit = compiled.traced.concrete, compiled.traced.audit
    if audit.fixed_seeds or audit.advances_seed or "RngReadAndSkip" in op_types(concrete):
        yield (
            f"draws from seeds: if the program has started again with the same seeds, new rows repeat the random numbers of "
            f"rows in {directory}. The option seed avoids this"
        )
    if audit.ordered:
        yield (
            f"writes variables in row order. {directory} does not hold their values, so new rows begin with the present ones"
        )


def _check_same_call(directory: Path, there: dict[str, Any], here: dict[str, Any], trust_function: bool) -> None:
    """Raise `JournalError` for another call. Its name and the version of TensorFlow may differ."""
    found = [key for key in {**here, **there} if there.get(key) != here.get(key)]
    relevant = {key.partition(".")[0] for key in found} - {"name", "tensorflow", "code" if trust_function else ""}
    if not relevant:
        return
    what, advice = "call", START_AGAIN
    if relevant <= {"code", "variable"}:
        what = "function or other variables" if "variable" in relevant else "function"
        if what == "function" and here["reducer"] is None:
            advice += "; if the change does not affect results, set trust_function=True (--trust-function)"
    if relevant <= {"batch_size", "chunk_rows"} and there.get("batch_size") != here["batch_size"]:
        advice += f"; or continue with batch_size={there.get('batch_size')!r:.20}"
    changes = [_change(key, there.get(key), here.get(key)) for key in found if key.partition(".")[0] in relevant]
    more = f"; and {len(changes) - 5} more" if len(changes) > 5 else ""
    raise JournalError(
        f"{directory} holds results of another {what}, of {there.get('name')!r:.100}: {'; '.join(changes[:5])}{more}. {advice}"
    )


def _change(key: str, there: Any, here: Any) -> str:
    """Describe a change of an entry of a description."""
    part, _, number = key.rpartition(".")
    if part in ("code.graph", "code.tensor", "variable"):  # a digest, after a dtype and a shape of captured values
        return f"{part.removeprefix('code.')} {number} {str(here or there).rpartition(' ')[0]}".strip() + " differs"
    return f"{key} was {there!r:.200} there, and is {here!r:.200} now"


def _check_same_rows(stored: StoredChunk, chunks: Sequence[Chunk], directory: Path) -> None:
    """Raise `JournalError` unless these chunks, in order, have the rows from which a stored chunk was computed."""
    try:
        with tf.device(HOST):
            same = digest([join(parts) for parts in zip(*(chunk.leaves for chunk in chunks))]) == stored.inputs
    except FunctionError:  # the chunks have different shapes, unlike the rows of a stored chunk
        same = False
    if not same:
        failed = " when it failed; on_error='raise', or retry_failed=True of write, computes it" if stored.error else ""
        raise _other_data(directory, f"rows {stored.start} to {stored.stop - 1} were not the same{failed}")


def _check_total(total: int, rows: int | None, directory: Path) -> None:
    """Raise `JournalError` if there are fewer than `total` rows. `rows` is `None` if unknown."""
    if rows is not None and rows < total:
        raise _other_data(directory, f"of {total} rows or more, and the data has {rows} now")


def _other_data(directory: Path, difference: str) -> JournalError:
    return JournalError(f"{directory} holds results of other data: {difference}. {START_AGAIN}")


class UnfinishedRows:
    """A source of those rows of another source that no stored chunk holds.

    Rows that take time to read are compared with those of the earlier run. Rows before a stored chunk are held until the chunk
    has been compared. So other data is refused before anything is computed, unless it begins with the same rows. Raises
    `JournalError` for other rows, and for fewer rows than the `total` of the earlier run.
    """

    def __init__(self, source: Source, stored: Sequence[StoredChunk], total: int, directory: Path):
        self.specs, self.reads = source.specs, source.reads
        self.rows_read = 0
        self._source, self._stored, self._total, self._directory = source, stored, total, directory
        self._finished_left = sum(chunk.stop - chunk.start for chunk in stored)
        self.rows = None if source.rows is None else source.rows - self._finished_left
        self._rows_wanted = 1
        self._rest: Chunk | None = None
        self._missing = self._read_missing()

    @property
    def chunk_rows(self) -> int | None:
        return self._source.chunk_rows

    def take(self, rows: int) -> Chunk | None:
        self._rows_wanted = rows
        return next(self._missing, None)

    def rows_left(self) -> int | None:
        left = self._source.rows_left()
        return None if left is None else max(0, left - self._finished_left)

    def close(self) -> None:
        self._source.close()

    def _read_missing(self) -> Iterator[Chunk]:
        for stored in self._stored:
            held = [*self._read_to(stored.start)]
            chunks = [*self._read_to(stored.stop, stored.stop - stored.start)]
            if self.rows_read < stored.stop:
                break
            if self.reads:
                _check_same_rows(stored, chunks, self._directory)
            self._finished_left -= stored.stop - stored.start
            yield from held
        yield from self._read_to(sys.maxsize)
        _check_total(self._total, self.rows_read, self._directory)

    def _read_to(self, stop: int, rows: int | None = None) -> Iterator[Chunk]:
        """Read to a row or to the end of the data, in chunks of `rows` or the wanted number of rows, if the source allows."""
        while self.rows_read < stop:
            chunk = self._rest or self._source.take(min(rows or self._rows_wanted, stop - self.rows_read))
            if chunk is None:
                return
            end = chunk.start + chunk.count
            self.rows_read = min(end, stop)
            self._rest = chunk.cut(self.rows_read, end) if self.rows_read < end else None
            yield chunk.cut(chunk.start, self.rows_read)
