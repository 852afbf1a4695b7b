"""The commands of the command line: each takes the parsed options, and prints what a user wants to know."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich

from devicemap.api import DeviceMap
from devicemap.bench.measurements import BenchmarkResult
from devicemap.bench.runner import benchmark
from devicemap.cli import UsageError
from devicemap.cli.input import read_input
from devicemap.cluster import serve
from devicemap.devices import list_devices, why_no_gpu
from devicemap.errors import DeviceMapError, failure
from devicemap.inspect.plan import Plan
from devicemap.inspect.render import short_names, size_text, table, text_of

_WIDE = 1000
"""Characters, for output that goes to a file or another program: no line is broken there."""


def devices_command(options: argparse.Namespace) -> None:
    """`devicemap devices`: a table of them, and why there is no GPU."""
    devices = list_devices()
    names = short_names(device.name for device in devices)
    listed = [
        {
            "name": names[device.name],
            "kind": device.kind,
            "memory": "-" if device.memory is None else size_text(device.memory),
            "description": device.description,
        }
        for device in devices
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    print(text_of(table(listed, {"kind", "description"}), width))
    if options.json:
        options.json.write_text(json.dumps([asdict(device) for device in devices], indent=1) + "\n", encoding="utf-8")
    if not any(device.kind == "GPU" for device in devices):
        print(f"\nNo GPU: {why_no_gpu()}")


def serve_command(options: argparse.Namespace) -> None:
    """`devicemap serve`: a server that runs until it is interrupted."""
    server = serve(options.port, options.simulate or 1)
    port = server.target.rpartition(":")[2]
    print(f"{socket.gethostname()}:{port} is open to all networks, without a password", flush=True)
    while True:
        time.sleep(0.1)  # a wait without an end can miss a signal that another thread gets


def explain_command(options: argparse.Namespace) -> None:
    """`devicemap explain`: the plan of a map."""
    _tell(_mapper(options).explain(_data(options)), options)


def bench_command(options: argparse.Namespace) -> None:
    """`devicemap bench`: what `devicemap.benchmark` finds out."""
    if options.batch_size == "auto":
        raise UsageError("--batch-size auto: bench varies batch sizes by itself; give a number, or leave it out")
    fn, data = _function(options.function), _data(options)
    result = benchmark(
        fn,
        data,
        devices=options.devices,
        batched=options.batched,
        seed=options.seed,
        batch_sizes=None if options.batch_size is None else [options.batch_size],
        max_rows=options.rows,
        seconds=options.seconds,
    )
    _tell(result, options)


def run_command(options: argparse.Namespace) -> None:
    """`devicemap run`: results in a folder."""
    if not options.quiet:
        rich.reconfigure(stderr=True)  # the bar is no output
    mapper = _mapper(options, progress=not options.quiet)
    results = mapper.write(_data(options), options.out, trust_function=options.trust_function)
    if (report := mapper.report) is not None:
        print(report.summary if report.rows or not len(results) else "no row was missing")
    print(f"{len(results)} rows in {options.out}; devicemap.open_results({options.out!r}) reads them")


def _tell(result: Plan | BenchmarkResult, options: argparse.Namespace) -> None:
    print(result)
    if options.json:
        result.save(options.json)
    if isinstance(result, BenchmarkResult) and options.plot:
        result.plot(options.plot)


def _mapper(options: argparse.Namespace, **more: Any) -> DeviceMap:
    # A batch that was read need not be what suits a device, unless the user says so.
    size = options.batch_size or ("auto" if options.batched else None)
    return DeviceMap(
        _function(options.function),
        devices=options.devices,
        batched=options.batched,
        batch_size=size,
        seed=options.seed,
        **more,
    )


def _data(options: argparse.Namespace) -> Any:
    size = options.batch_size if isinstance(options.batch_size, int) else None
    return read_input(options.input, options.batched, size)


def _function(where: str) -> Callable[..., Any]:
    """What `MODULE:FUNCTION` names; modules of the current directory are found first, as by `python -m`."""
    module_name, _, path = where.partition(":")
    if not module_name or not path:
        raise UsageError(f"{where!r} is no function; expected MODULE:FUNCTION, as in features:extract")
    if module_name.endswith(".py") or os.sep in module_name:
        name = module_name.removesuffix(".py").strip(f".{os.sep}").replace(os.sep, ".")
        raise UsageError(f"{module_name!r} is a file; expected a module, as in {name}:{path}, run where it is found")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found = _import(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            there = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
            raise UsageError(f"{where!r}: there is no {name!r} in it; there is {', '.join(sorted(there)) or 'nothing'}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{where!r} is of type {type(found).__name__}, which cannot be called")
    function: Callable[..., Any] = found
    return function


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except DeviceMapError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"there is no module {module!r} in {Path.cwd()}, nor among those installed") from error
        raise failure(f"importing {module} failed: {type(error).__name__}: {error}") from error
