"""Calls whose results go to a directory, chunk by chunk."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorflow as tf

from devicemap.compile.compiled import CompiledMap
from devicemap.compile.reduction import BoundReduction
from devicemap.data.rows import as_rows
from devicemap.data.sources import Chunk, DatasetSource, Source
from devicemap.errors import JournalError, MissingRowsError, error_text, warn_user
from devicemap.events import Shard
from devicemap.run.mapper import Mapper
from devicemap.run.workers import ChunkOptions
from devicemap.store.chunks import StoredChunk
from devicemap.store.database import Header, open_database
from devicemap.store.encoding import START_AGAIN, describe_nest, encode_leaves, specs_of
from devicemap.store.fingerprint import fingerprint
from devicemap.store.resume import Unfinished, check_total, compared, digest_rows
from devicemap.store.writer import Writer


def write(
    mapper: Mapper, data: Any, directory: str | os.PathLike[str], trust_function: bool, retry_failed: bool
) -> None:
    """Compute and store the chunks that a directory does not hold; the arguments are those of `DeviceMap.write`."""
    _write_missing(mapper, data, Path(directory), trust_function, retry_failed)


def reduce(mapper: Mapper, data: Any, directory: str | os.PathLike[str]) -> Any:
    """Compute and store the states of the chunks that a directory does not hold, and return the result of all states."""
    path = Path(directory)
    compiled, left_out = _write_missing(mapper, data, path)
    if left_out:
        warn_user(
            f"{mapper.program.name}: {len(left_out)} row(s) failed in earlier runs and are left out; the first: row "
            f"{left_out[0].start}: {left_out[0].error}. Without on_error='skip' they are computed again",
            RuntimeWarning,
        )
    with open_database(path) as database:
        _, stored = database.contents()
        finished = (chunk for chunk in stored if chunk.error is None)
        return compiled.pack_states(database.leaves(chunk, compiled.traced.specs, 1) for chunk in finished)


def _write_missing(
    mapper: Mapper, data: Any, directory: Path, trust_function: bool = False, retry_failed: bool = False
) -> tuple[CompiledMap, list[StoredChunk]]:
    """Return the compiled map, and the rows that failed before and are not tried again."""
    in_memory = not isinstance(data, tf.data.Dataset)
    rows = as_rows(data) if in_memory else data
    source = mapper.source(rows, "written")
    compiled = mapper.program.compiled_for(source)
    call, uncovered = _describe_call(mapper, source, compiled)
    with Writer(directory) as writer:
        total, stored = None, writer.stored
        if writer.header is not None and stored:
            _check_same_call(directory, writer.header.call, call, trust_function)
            call, total = writer.header
            if uncovered:
                warn_user(
                    f"{mapper.program.name} uses {' and '.join(uncovered)}: if these changed, the results in {directory} are "
                    "old, which devicemap does not detect",
                    RuntimeWarning,
                )
        failed = [chunk for chunk in stored if chunk.error is not None]
        retries = retry_failed or mapper.program.options.on_error == "raise"
        if retries:
            stored = [chunk for chunk in stored if chunk.error is None]
        check_total(total, source.rows, directory)
        if in_memory:  # in one piece, as arrays, which are cut faster than tensors
            leaves = tuple(leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf for leaf in rows.leaves)
            deque(compared([Chunk(0, source.rows or 0, leaves)], stored, total, directory), 0)
        stored = _undamaged(directory, stored, compiled)
        missing = Unfinished(source, stored, total, directory, compare=not in_memory)
        writer.begin(Header(call, source.rows), [*stored, *failed] if retries else stored)

        def keep(chunk: Chunk, results: list[Any]) -> None:
            writer.append(chunk.start, chunk.start + chunk.count, digest_rows(chunk.leaves), encode_leaves(results))

        def leave_out(row: Chunk, shard: Shard, error: BaseException) -> None:
            writer.append_failed(row.start, digest_rows(row.leaves), shard.device, error_text(error))

        for _ in mapper.chunks(missing, compiled, ChunkOptions(leave_out=leave_out), keep):
            pass
        writer.finish(missing.rows_read)
    return compiled, [] if retries else failed


def _describe_call(mapper: Mapper, source: Source, compiled: CompiledMap) -> tuple[dict[str, Any], list[str]]:
    """Return what the results of a call depend on, as JSON, and what that does not cover."""
    options, reduction = mapper.program.options, compiled.traced.reduction
    results = describe_nest(compiled.traced.nest_of_specs)
    try:
        specs_of(results)
    except ValueError as error:
        raise JournalError(f"the results of fn cannot be written to disk: {error}") from error
    function, uncovered = fingerprint(compiled.traced)
    call = {
        "results": results,
        "inputs": describe_nest(source.specs),
        "batched": options.batched,
        "batch_size": options.batch_size,
        "chunk_rows": source.rows_of_first_batch() if isinstance(source, DatasetSource) else None,
        "seed": None if options.seed is None else int(options.seed),
        "reducer": [*reduction.names] if isinstance(reduction, BoundReduction) else None,
        **function,
        "tensorflow": tf.__version__,
        "name": mapper.program.name,
    }
    return json.loads(json.dumps(call)), uncovered


def _check_same_call(directory: Path, there: dict[str, Any], here: dict[str, Any], trust_function: bool) -> None:
    """Raise `JournalError` for another call. Its name and the version of TensorFlow alone make no difference."""
    found = differences(there, here)
    ignored = "name ", "tensorflow ", *(["code."] if trust_function else [])
    relevant = [line for line in found if not line.startswith(ignored)]
    if not relevant:
        return
    what, advice = "call", START_AGAIN
    if all(line.startswith(("code.", "variables")) for line in relevant):
        what = "function or other variables" if relevant[-1].startswith("variables") else "function"
        if what == "function" and here["reducer"] is None:
            advice += "; if the change does not affect results, set trust_function=True (--trust-function)"
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    raise JournalError(
        f"{directory} holds results of another {what}, of {there.get('name')!r:.100}: {'; '.join(found[:5])}{more}. {advice}"
    )


def differences(there: Any, here: Any, path: str = "") -> list[str]:
    """Return in words where two JSON values differ.

    >>> differences({"a": [1, 2]}, {"a": [1, 3]})
    ['a.1 was 2 there, and is 3 now']
    """
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        there, here = ({str(i): value for i, value in enumerate(values)} for values in (there, here))
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*here, *(key for key in there if key not in here)]
        return [
            line for key in keys for line in differences(there.get(key), here.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if there == here else [f"{path} was {there!r:.200} there, and is {here!r:.200} now"]


def _undamaged(directory: Path, stored: Sequence[StoredChunk], compiled: CompiledMap) -> list[StoredChunk]:
    """Return the stored chunks that can be read. All are read once, at the speed of the disk."""
    whole = []
    rows = None if compiled.traced.reduction is None else 1
    if stored:
        with open_database(directory) as database:
            for chunk in stored:
                with suppress(MissingRowsError):
                    if chunk.error is None:
                        database.leaves(chunk, compiled.traced.specs, rows)
                    whole.append(chunk)
    return whole
