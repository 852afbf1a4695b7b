"""The commands of the command line. Each takes the parsed arguments."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import rich
import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.bench.measurements import BenchmarkResult
from devicemap.bench.runner import benchmark
from devicemap.cli.check import check, print_devices, print_environment
from devicemap.cli.input import Input, load_object, read_input
from devicemap.cluster import serve
from devicemap.devices import is_out_of_memory, list_devices, simulate_devices
from devicemap.errors import DataError, FunctionError, brief, function_error
from devicemap.events import short_name
from devicemap.inspect.plan import Plan
from devicemap.inspect.render import check_drawable
from devicemap.store.export import RESULT, check_format, replacing
from devicemap.store.results import Results

_LOADING = {
    ".npy": "numpy.load({!r})",
    ".npz": "numpy.load({!r})",
    ".parquet": "pyarrow.parquet.read_table({!r})",
    ".tfrecord": "tf.data.TFRecordDataset({!r})",
}
"""The files that `run` writes, by suffix, and how to load them. Other names are directories."""


ROWS_FAILED = 3
"""The exit code of `run --skip-errors` if rows failed."""


def execute(options: argparse.Namespace) -> int:
    """Execute the command that `options.command` names, and return its exit code."""
    if options.simulate:
        simulate_devices(options.simulate)
    commands: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "devices": _devices, "explain": _explain, "bench": _bench, "run": _run, "serve": _serve,
        "check": _check, "env": _env,
    }  # fmt: skip
    return commands[options.command](options) or 0


def _devices(options: argparse.Namespace) -> None:
    devices = list_devices()
    print_devices(devices)
    if options.json:
        options.json.write_text(json.dumps([asdict(device) for device in devices], indent=1) + "\n", encoding="utf-8")


def _check(options: argparse.Namespace) -> int:
    return 0 if check(options.devices, options.seconds, options.json) else 1


def _env(options: argparse.Namespace) -> None:
    print_environment(options.json)


def _serve(options: argparse.Namespace) -> None:
    server = serve(options.port, options.simulate or 1)
    port = server.target.rpartition(":")[2]
    print(f"{socket.gethostname()}:{port} is open to all networks, without a password", flush=True)
    while True:
        time.sleep(0.1)  # an endless wait can miss a signal that another thread receives


def _explain(options: argparse.Namespace) -> None:
    _show(_mapper(options).explain(_read(options).data), options)


def _bench(options: argparse.Namespace) -> None:
    if options.plot:
        check_drawable(options.plot)
    sizes = [options.batch_size] if options.batch_size else None
    mapped = {"devices": options.devices, "batched": options.batched, "seed": options.seed}
    limits = {"max_rows": options.rows, "seconds": options.seconds}
    result = benchmark(load_object(options.function), _read(options).data, batch_sizes=sizes, **limits, **mapped)
    _show(result, options)
    if options.plot:
        result.plot(options.plot)


def _show(result: Plan | BenchmarkResult, options: argparse.Namespace) -> None:
    print(result)
    if options.json:
        result.save(options.json)


def _read(options: argparse.Namespace) -> Input:
    return read_input(options.input, options.batched, options.batch_size)


def _run(options: argparse.Namespace) -> int:
    if not options.quiet:
        rich.reconfigure(stderr=True)  # so that the progress bar is not part of the output
    on_error = "skip" if options.skip_errors else "raise"
    mapper = _mapper(options, progress=not options.quiet, on_error=on_error)
    source = _read(options)
    out, suffix = Path(options.out), Path(options.out).suffix
    directory = Path(f"{out}.partial") if suffix in _LOADING else out
    if suffix in _LOADING:
        if out.exists() and not directory.exists():
            raise FileExistsError(f"{out} already exists; remove it to compute it again")
        check_format(suffix, mapper.as_dataset(source.data).element_spec)
    try:
        results = mapper.write(source.data, directory, trust_function=options.trust_function)
    except FunctionError as error:
        if not error.shards:
            raise
        raise function_error(f"{_failing_rows(options, source, error)}: {error}", error, error.shards) from error
    except tf.errors.OpError as error:
        raise _reading_error(source, error) from error
    if mapper.report is not None:
        print(mapper.report.summary if mapper.report.rows or not len(results) else "no row was missing")
    for failed in results.failed_rows:
        print(f"{source.locate(failed.row)} failed on {short_name(failed.device)}: {failed.error}")
    if suffix in _LOADING:
        _save(suffix, results, out)
        shutil.rmtree(directory)
    loading = _LOADING.get(suffix, "devicemap.open_results({!r}).load()")
    left_out = f", without {len(results.failed_rows)} that failed" if results.failed_rows else ""
    print(f"{len(results)} rows in {out}{left_out}; load them by {loading.format(str(out))}")
    return ROWS_FAILED if results.failed_rows else 0


def _mapper(options: argparse.Namespace, **changed: Any) -> DeviceMap:
    given = {name: getattr(options, name) for name in ("devices", "batched", "seed")}
    # Batches of the input have any size, unless the user chose it.
    given["batch_size"] = options.batch_size or ("auto" if options.batched else None)
    return DeviceMap(load_object(options.function), **{**given, **changed})


def _failing_rows(options: argparse.Namespace, source: Input, error: FunctionError) -> str:
    """Locate the row that failed, by mapping the rows of the failed chunk one by one; or its first and last row."""
    shard = error.shards[0]
    start, stop = shard.start, shard.stop
    if len(shard) > 1 and not is_out_of_memory(error):
        rows = source.take(start, stop)
        rows = rows.batch(1) if options.batched and isinstance(rows, tf.data.Dataset) else rows
        try:
            for _ in _mapper(options, devices=shard.device, batch_size=1).stream(rows):
                pass
        except FunctionError as found:
            if found.shards:
                start += found.shards[0].start
                stop = start + 1
    rows_text = [source.locate(start), source.locate(stop - 1)]
    return " to ".join(dict.fromkeys(rows_text))


def _reading_error(source: Input, error: Exception) -> Exception:
    """Return an error that names the first row that cannot be read, by reading all; or `error` if they can."""
    row = 0
    try:
        for _ in source.rows:
            row += 1
    except tf.errors.OpError as found:
        return DataError(f"{source.locate(row)} cannot be read: {brief(found)}")
    return error


def _save(suffix: str, results: Results, path: Path) -> None:
    if suffix == ".npy":
        results.to_npy(path)
    elif suffix == ".parquet":
        results.to_parquet(path)
    elif suffix == ".tfrecord":
        results.to_tfrecords(path)
    else:
        loaded = results.load()
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **(loaded if isinstance(loaded, dict) else {RESULT: loaded}))
