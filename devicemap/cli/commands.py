"""The commands of the command line. Each takes the parsed arguments."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich
import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.bench.runner import benchmark
from devicemap.cli.check import check, show_devices, show_environment
from devicemap.cli.input import Input, load_object, read_input
from devicemap.cluster import serve
from devicemap.devices import simulate_devices
from devicemap.errors import DataError, DeviceMapError, FunctionError, JournalError, OptionError, brief
from devicemap.events import short_name
from devicemap.inspect.render import Result, check_drawable, counted
from devicemap.store.database import DATABASE
from devicemap.store.export import check_format, export
from devicemap.store.results import Results

ROWS_FAILED = 3
"""The exit code of `run --skip-errors` if rows failed."""


def execute(options: argparse.Namespace) -> int:
    """Execute the command that `options.command` names, and return its exit code."""
    if options.simulate is not None:
        simulate_devices(options.simulate)
    commands: dict[str, Callable[[argparse.Namespace], Any]] = {
        "devices": lambda options: show_devices(),
        "explain": lambda options: _show(_mapper(options).explain(_read(options).data)),
        "bench": _bench,
        "run": _run,
        "serve": _serve,
        "check": lambda options: check(options.devices, options.seconds),
        "env": lambda options: show_environment(),
    }
    found = commands[options.command](options)
    if getattr(options, "json", None):
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.command == "check":
        return 0 if found["ok"] else 1
    return ROWS_FAILED if options.command == "run" and found else 0


def _serve(options: argparse.Namespace) -> None:
    server = serve(options.port, options.simulate or 1)
    port = server.target.rpartition(":")[2]
    print(f"{socket.gethostname()}:{port} is open to all networks, without a password", flush=True)
    while True:
        time.sleep(0.1)  # an endless wait can miss a signal that another thread receives


def _bench(options: argparse.Namespace) -> dict[str, Any]:
    if options.plot:
        check_drawable(options.plot)
    sizes = None if options.batch_size is None else [options.batch_size]
    mapped = {"devices": options.devices, "batched": options.batched, "seed": options.seed}
    limits = {"max_rows": options.rows, "seconds": options.seconds}
    result = benchmark(load_object(options.function), _read(options).data, batch_sizes=sizes, **limits, **mapped)
    found = _show(result)
    if options.plot:
        result.plot(options.plot)
    return found


def _show(result: Result) -> dict[str, Any]:
    print(result)
    return result.to_dict()


def _mapper(options: argparse.Namespace, **changed: Any) -> DeviceMap:
    given = {name: getattr(options, name) for name in ("devices", "batched", "batch_size", "seed")}
    if options.batched and options.batch_size is None:
        given["batch_size"] = "auto"  # batches of the input have any size
    return DeviceMap(load_object(options.function), **{**given, **changed})


def _read(options: argparse.Namespace) -> Input:
    return read_input(options.input, options.batched, options.batch_size)


def _run(options: argparse.Namespace) -> int:
    """Return the number of rows that failed and were left out."""
    if not options.out:
        raise OptionError("--out is empty; expected a file or a directory for the results")
    suffix = _output_suffix(Path(options.out))
    if not options.quiet:
        rich.reconfigure(stderr=True)  # so that the progress bar is not part of the output
    mapper = _mapper(options, progress=not options.quiet, on_error="skip" if options.skip_errors else "raise")
    source, out = _read(options), Path(options.out)
    loading, save = _FILES.get(suffix, "devicemap.open_results({!r}).load()"), suffix in _FILES
    directory = Path(f"{out}.partial") if save else out
    if save:
        if out.exists() and not (directory / DATABASE).exists():
            raise FileExistsError(f"{out} already exists; remove it to compute it again")
        check_format(suffix, mapper.as_dataset(source.data).element_spec)
    warnings.filterwarnings("ignore", ".* left out; the first: ")  # all are printed below
    try:
        results = mapper.write(source.data, directory, trust_function=options.trust_function)
    except FunctionError as error:
        if not error.shards:
            raise
        raise DeviceMapError(f"{_failing_rows(options, source, error)}: {error}") from error
    except tf.errors.OpError as error:
        raise _reading_error(source, error) from error
    report, failed, count = mapper.report, results.failed_rows, len(results)
    if save:  # before anything is printed, because that fails if the reader of the output has ended
        _export(results, directory, out, suffix)
        shutil.rmtree(directory)
    source.counts()  # warns of records that were cut off
    print(report.summary if report and (report.rows or report.failed_rows) else "no row was missing")
    for row in failed:
        print(f"{source.locate(row.row)} failed on {short_name(row.device)}: {row.error}")
    left_out = f", without {len(failed)} that failed" if failed else ""
    print(f"{counted(count, 'row')} in {out}{left_out}; load them by {loading.format(str(out))}")
    return len(failed)


def _output_suffix(out: Path) -> str:
    """Return the suffix of the format of a file. Names of directories may have any suffix that is not of another format."""
    suffix = out.suffix.lower()
    if suffix in _OTHER_FILES and not out.is_dir():
        raise OptionError(f"--out {out}; expected the suffix {', '.join(_FILES)}, or a directory without a suffix")
    return suffix


def _export(results: Results, directory: Path, out: Path, suffix: str) -> None:
    try:
        export(results, out, suffix)
    except (OptionError, JournalError) as error:  # rows of different shapes, which only the results show
        saving = f"devicemap.open_results({str(directory)!r}).to_parquet({str(out.with_suffix('.parquet'))!r})"
        raise type(error)(f"{error}. All rows are in {directory}: {saving} saves them") from error
    except OSError as error:
        kept = f"All rows are in {directory}: repeat the command when {out} can be written"
        raise DeviceMapError(f"writing {out} failed: {error}. {kept}") from error


def _failing_rows(options: argparse.Namespace, source: Input, error: FunctionError) -> str:
    """Name the row that failed, by mapping the rows of the failed chunk one by one, or else the rows of the chunk."""
    shard = error.shards[-1]  # the first ones are of devices that tried it before
    first, last = shard.start, shard.stop - 1
    if first < last:
        rows = source.rows
        rows = rows if isinstance(rows, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(rows)
        rows = rows.skip(first).take(len(shard))
        mapper = _mapper(options, devices=shard.device, batch_size=1)
        try:
            deque(mapper.stream(rows.batch(1) if options.batched else rows), 0)
        except FunctionError as found:
            if found.shards:
                first = last = first + found.shards[0].start
    return " to ".join(dict.fromkeys(map(source.locate, (first, last))))


def _reading_error(source: Input, error: Exception) -> Exception:
    """Read all rows, and return an error that names the first unreadable row, or `error` if there is none."""
    row = 0
    try:
        for _ in source.rows:
            row += 1
    except tf.errors.OpError as found:
        return DataError(f"{source.locate(row)} cannot be read: {brief(found)}")
    return error


_FILES = {
    ".npy": "numpy.load({!r})",
    ".npz": "numpy.load({!r})",
    ".parquet": "pyarrow.parquet.read_table({!r})",
}
"""Code to load the files that `run` writes, by suffix. Other names are directories."""

_OTHER_FILES = frozenset(
    ".arrow .avro .bz2 .csv .feather .gz .h5 .hdf5 .ipc .json .jsonl .keras .mat .ndjson .orc .pickle .pkl .pq .pt "
    ".safetensors .sqlite .tar .tfrec .tfrecord .tfrecords .tsv .txt .xlsx .xz .zip .zst".split()
)
"""Suffixes of files that `run` cannot write, for which a directory would be a surprise."""
