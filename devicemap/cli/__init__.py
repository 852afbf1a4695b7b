"""The command line: what may stand there, and how a command ends. The commands themselves are in `commands`.

Exit codes: 0, 1 for what goes wrong while it runs, 2 for a command line that cannot be, 130 for Ctrl-C. Nothing here
imports TensorFlow before a command runs: `devicemap --help` is there at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from devicemap import __version__
from devicemap.errors import DeviceMapError, OptionError

_FUNCTION = "MODULE:FUNCTION, where MODULE is found from the current directory on, as by python -m"
_INPUT = """a .npy or .npz file (several arrays: a dict by name), TFRecord files, a folder saved by tf.data.Dataset.save, or any
other files, given as bytes; a folder stands for the files in it, in the order of their names; a pattern in quotes for
those it matches"""


class UsageError(Exception):
    """A command line that cannot be, found out after it was parsed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    Args:
        arguments: without the program's name; `None` for those of this process.
    """
    parser = _build_parser()
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # a program's own right: its messages are not TensorFlow's
    try:
        command = _load_command(options)
        command(options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        kept = " What was finished is kept: run the same command again to go on." if options.command == "run" else ""
        return _fail(options, f"interrupted.{kept}", 130)
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UsageError, OptionError) as error:
        return _fail(options, str(error), 2)
    except (DeviceMapError, OSError, ImportError) as error:
        return _fail(options, str(error), 1)
    except Exception as error:
        return _fail(options, f"{type(error).__name__}: {error} (--traceback shows where)", 1)


def _load_command(options: argparse.Namespace) -> Callable[[argparse.Namespace], None]:
    """TensorFlow is imported here, and before anything can use it, its devices are set."""
    from devicemap.cli import commands
    from devicemap.inspect.render import check_drawable

    if path := getattr(options, "plot", None):
        check_drawable(path)
    if options.simulate is not None:
        from devicemap.devices import simulate_devices

        simulate_devices(options.simulate)
    run: Callable[[argparse.Namespace], None] = getattr(commands, f"{options.command}_command")
    return run


def _fail(options: argparse.Namespace, message: str, code: int) -> int:
    sys.stdout.flush()
    if options.traceback:
        traceback.print_exc()
    print(f"devicemap {options.command}: {'' if code == 130 else 'error: '}{message}", file=sys.stderr)
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devicemap", description="Map a TensorFlow function over data on every device of this machine."
    )
    parser.add_argument("--version", action="version", version=f"devicemap {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--simulate", type=_count, metavar="N", help="cut the CPU into N logical devices, to try things out"
    )
    common.add_argument("--traceback", action="store_true", help="where an error comes from, in full")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = _add(commands, "devices", "list the devices, and say why no GPU was found", common)
    listing.add_argument("--json", type=_new_file, metavar="FILE", help="save them")
    mapping = argparse.ArgumentParser(add_help=False, parents=[common])
    mapping.add_argument("function", metavar="MODULE:FUNCTION", help=_FUNCTION)
    mapping.add_argument("input", metavar="INPUT", help=_INPUT)
    mapping.add_argument(
        "--devices", type=_devices, metavar="NAMES", help="a kind (GPU), or names (GPU:0,GPU:2); all GPUs"
    )
    mapping.add_argument("--batched", action="store_true", help="FUNCTION takes a batch of rows, not one sample")
    mapping.add_argument(
        "--batch-size", type=_batch_size, metavar="N", help="rows per device call (found by measuring)"
    )
    mapping.add_argument("--seed", type=int, metavar="N", help="FUNCTION also gets seed=, for tf.random.stateless_*")
    serving = _add(commands, "serve", "serve this machine's devices to devicemap.connect, until Ctrl-C", common)
    serving.add_argument("--port", type=_port, required=True, metavar="N", help="port to listen on; 0: any free port")
    serving.add_argument(
        "--open",
        action="store_true",
        required=True,
        help="confirm that the port is open on all network interfaces, without a password: who reaches it can run code here",
    )
    run = _add(commands, "run", "map over all rows, and keep the results in a folder; run again, it goes on", mapping)
    run.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one that the same command has left")
    run.add_argument(
        "--trust-function", action="store_true", help="go on with results of another FUNCTION, that would be the same"
    )
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    explain = _add(commands, "explain", "say what will run where, and what stands in the way of parallelism", mapping)
    bench = _add(commands, "bench", "measure eager code against graphs, one device against all", mapping)
    for command in (explain, bench):
        command.add_argument("--json", type=_new_file, metavar="FILE", help="save what is found")
    bench.add_argument("--plot", type=_new_file, metavar="FILE", help="draw the result (.png, .svg, .pdf)")
    bench.add_argument("--rows", type=_count, metavar="N", help="the first N rows; 1024 of what is read while mapping")
    bench.add_argument("--seconds", type=float, default=30.0, metavar="S", help="how long to measure (%(default)s)")
    return parser


def _add(commands: Any, name: str, what: str, parent: argparse.ArgumentParser) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name, parents=[parent], help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    return added


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a whole number from 0 to 65535")
    return int(text)


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else _count(text)


def _devices(text: str) -> str | list[str]:
    """A kind stays alone; names are separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return names[0] if len(names) == 1 else names


def _new_file(text: str) -> Path:
    """A file to be written later: found out now whether its folder is there."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file in a folder that exists")
    return path
