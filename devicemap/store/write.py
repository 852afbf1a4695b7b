"""A call whose results go to a directory, chunk by chunk."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from devicemap.base.interruption import Signals
from devicemap.data.chunks import Chunk
from devicemap.data.datasets import Elements
from devicemap.data.rows import as_rows
from devicemap.run.calls import Calls
from devicemap.run.dispatch import Rules
from devicemap.store.digests import digest_rows
from devicemap.store.encoding import describe_call, encode_leaves
from devicemap.store.fingerprint import fingerprint
from devicemap.store.journal import open_journal
from devicemap.store.resume import Unfinished, check_rows


def write(
    calls: Calls, data: Any, directory: str | os.PathLike[str], check_variables: bool, trust_function: bool
) -> None:
    """Keep the results of all chunks that a directory does not hold yet; the arguments are those of `DeviceMap.write`."""
    in_memory = not isinstance(data, tf.data.Dataset)
    rows = as_rows(data) if in_memory else data
    source = calls.source(rows, "written")
    program = calls.program
    compiled = program.compiled_for(source)
    chunk_rows = source.rows_of_first_batch() if isinstance(source, Elements) else None
    header = describe_call(
        compiled.traced.nest_of_specs,
        source.specs,
        program.options,
        source.rows,
        chunk_rows,
        fingerprint(compiled.traced, check_variables),
        program.name,
    )
    with (
        Signals(),
        open_journal(directory, header, trust_function) as journal,
    ):  # a TimeoutError is an OSError: the disk's, it seems
        if in_memory:
            check_rows(rows, journal)
        missing = Unfinished(source, journal, compared=in_memory)

        def keep(chunk: Chunk, results: list[Any]) -> None:
            stop = chunk.start + chunk.count
            journal.append(chunk.start, stop, encode_leaves(results), digest_rows(chunk.leaves))

        for _ in calls.groups(missing, compiled, Rules(), keep):
            pass
        journal.finish(missing.rows_read)
