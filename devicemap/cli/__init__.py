"""The command line: its arguments and exit codes. The commands are in `commands`.

Exit codes: 0; 1 for an error; 2 for invalid arguments; 3 if rows were left out; 130 for Ctrl-C. TensorFlow is imported when a
command runs, so `devicemap --help` is instant.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from devicemap import __version__
from devicemap.errors import DeviceMapError, OptionError, error_text

_INPUT = """a .npy file; a .npz file (a dict of its arrays); TFRecord files (.tfrecord, .tfrecords, .tfrec); any other files, as
bytes; a folder or a quoted pattern of files of one kind; a folder written by tf.data.Dataset.save; or MODULE:DATASET, data or
a function that returns it"""


_FLAGS = {"batched=True": "--batched", "the option seed, as in parallel_map(fn, data, seed=1)": "--seed 1"}
"""Words of messages about options -> flags of the command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. `None` stands for the arguments of this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # if a file was replaced by a pipe
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files may have any characters
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        several = hasattr(options, "input") and not any(each.startswith("-") for each in unknown)
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}" + "; quote a pattern of files: 'pictures/*.png'" * several
        )
    logged = "3" if options.command == "check" else "2"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", logged)  # before importing TensorFlow
    try:
        from devicemap.cli import commands

        code = commands.execute(options)
        _flush()
        return code
    except KeyboardInterrupt:
        kept = " Finished chunks are kept: repeat the command to continue." if options.command == "run" else ""
        return _fail(options, f"interrupted.{kept}", 130)
    except BrokenPipeError:  # the reader of the output has ended, for instance `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DeviceMapError, OSError, ImportError) as error:
        text = str(error)
        for option, flag in _FLAGS.items():
            text = text.replace(option, flag)
        return _fail(options, f"error: {text}", 2 if isinstance(error, OptionError) else 1)
    except Exception as error:
        return _fail(options, f"error: {error_text(error)} (--traceback shows the source line)", 1)


def _flush() -> None:
    if sys.stdout is not None:  # it is if the caller has closed it
        sys.stdout.flush()


def _fail(options: argparse.Namespace, message: str, code: int) -> int:
    _flush()
    if options.traceback:
        traceback.print_exc()
    print(f"devicemap {options.command}: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("devicemap", description="Map a TensorFlow function over data on all devices.")
    parser.add_argument("--version", action="version", version=f"devicemap {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--simulate", type=int, metavar="N", help="split the CPU into N devices")
    common.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    saving = argparse.ArgumentParser(add_help=False)
    saving.add_argument("--json", type=_new_file, metavar="FILE", help="save the result as JSON")
    choosing = argparse.ArgumentParser(add_help=False)
    choosing.add_argument("--devices", type=_devices, metavar="NAMES", help="a kind (GPU) or names (GPU:0,GPU:2)")
    mapping = argparse.ArgumentParser(add_help=False, parents=[choosing])
    mapping.add_argument("function", metavar="MODULE:FUNCTION", help="found from the current directory")
    mapping.add_argument("input", metavar="INPUT", help=_INPUT)
    mapping.add_argument("--batched", action="store_true", help="FUNCTION takes a batch of rows")
    mapping.add_argument("--batch-size", type=int, metavar="N", help="rows per device call; bench: of all devices")
    mapping.add_argument("--seed", type=int, metavar="N", help="FUNCTION also takes seed=, for tf.random.stateless_*")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, description: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[*parents, common], help=description, description=description)

    add("devices", "List the devices, and why there is no GPU.", saving)
    add("explain", "Show what runs on which device, and what prevents parallelism.", mapping, saving)
    bench = add("bench", "Measure eager code, one device and all devices, and memory.", mapping, saving)
    bench.add_argument("--plot", type=_new_file, metavar="FILE", help="draw time and memory (.png, .svg, .pdf)")
    bench.add_argument("--rows", type=int, metavar="N", help="use the first N rows (default: 1024 of a dataset)")
    bench.add_argument("--seconds", type=float, default=30.0, metavar="S", help="time budget (default: %(default)s)")
    run = add("run", "Map over all rows and write the results. Repeat the command to continue a run.", mapping)
    files = "a .npy, .npz or .parquet file, or a directory"
    run.add_argument("--out", required=True, metavar="PATH", help=files)
    run.add_argument("--skip-errors", action="store_true", help="leave out rows that fail, and exit with code 3")
    run.add_argument("--trust-function", action="store_true", help="continue results of a changed FUNCTION")
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    tested = "Test each guarantee on the devices of this machine, and measure speed-ups: two minutes."
    check = add("check", tested, choosing, saving)
    measured = "how long one device computes for each measurement (default: %(default)s)"
    check.add_argument("--seconds", type=float, default=1.0, metavar="S", help=measured)
    add("env", "Print versions and devices, for a report of an error.", saving)
    serve = add("serve", "Serve the devices of this machine to devicemap.connect, until Ctrl-C.")
    serve.add_argument("--port", type=int, required=True, metavar="N", help="0 for any free port")
    confirmed = "confirm that the port is open on all network interfaces without a password: clients can run any code"
    serve.add_argument("--open", action="store_true", required=True, help=confirmed)
    return parser


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or its folder does not exist; expected a file to write")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"there is no permission to write {text}")
    return path


def _devices(text: str) -> str | list[str]:
    names = text.replace(" ", "").split(",")
    return names if len(names) > 1 else names[0]
