"""A call whose results go to a directory, chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from devicemap.compile.compiled import CompiledMap
from devicemap.compile.reduction import BoundReduction
from devicemap.data.rows import as_rows
from devicemap.data.sources import Chunk, DatasetSource
from devicemap.errors import warn_user
from devicemap.run.mapper import Mapper
from devicemap.run.workers import ChunkOptions
from devicemap.store.digests import digest_rows
from devicemap.store.encoding import decode_leaves, describe_call, encode_leaves
from devicemap.store.fingerprint import fingerprint
from devicemap.store.journal import Journal, open_journal
from devicemap.store.resume import Unfinished, check_rows


def write(mapper: Mapper, data: Any, directory: str | os.PathLike[str], trust_function: bool) -> None:
    """Keep the results of all chunks that a directory does not hold yet; the arguments are those of `DeviceMap.write`."""
    with _written(mapper, data, directory, trust_function):
        pass


def reduce(mapper: Mapper, data: Any, directory: str | os.PathLike[str]) -> Any:
    """Keep the states of all chunks that a directory does not hold yet: the result of those that are there then."""
    with _written(mapper, data, directory) as (compiled, journal):
        return compiled.pack_states(decode_leaves(arrays, compiled.traced.specs) for arrays in journal.read())


@contextmanager
def _written(
    mapper: Mapper, data: Any, directory: str | os.PathLike[str], trust_function: bool = False
) -> Iterator[tuple[CompiledMap, Journal]]:
    """The journal with all chunks in it, and what they were computed with."""
    in_memory = not isinstance(data, tf.data.Dataset)
    rows = as_rows(data) if in_memory else data
    source = mapper.source(rows, "written")
    program = mapper.program
    compiled = program.compiled_for(source)
    chunk_rows = source.rows_of_first_batch() if isinstance(source, DatasetSource) else None
    reduction = compiled.traced.reduction
    function, uncovered = fingerprint(compiled.traced)
    header = describe_call(
        compiled.traced.nest_of_specs,
        source.specs,
        program.options,
        source.rows,
        chunk_rows,
        function,
        program.name,
        [*reduction.names] if isinstance(reduction, BoundReduction) else None,
    )
    with open_journal(directory, header, trust_function) as journal:
        if uncovered and journal.entries:
            warn_user(
                f"{program.name} uses {' and '.join(uncovered)}: if these changed, the results in {directory} are old, which "
                "devicemap does not detect",
                RuntimeWarning,
            )
        if in_memory:
            check_rows(rows, journal)
        missing = Unfinished(source, journal, compared=in_memory)

        def keep(chunk: Chunk, results: list[Any]) -> None:
            stop = chunk.start + chunk.count
            journal.append(chunk.start, stop, encode_leaves(results), digest_rows(chunk.leaves))

        for _ in mapper.chunks(missing, compiled, ChunkOptions(), keep):
            pass
        journal.finish(missing.rows_read)
        yield compiled, journal
