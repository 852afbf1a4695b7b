"""C++ compiled for the TensorFlow that is installed, and kept beside its source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

SOURCE = Path(__file__).with_name("accelerator.cc")
"""The simulator's."""

_OPTIONS = ("-O1", "-shared", "-fPIC", "-pthread", "-w", "-DNDEBUG")
"""`NDEBUG`, because TensorFlow is built with it and its headers differ without; `-w`, as the warnings are theirs."""

_TIMEOUT_SECONDS = 600


class Unavailable(RuntimeError):
    """What was to be compiled cannot be had on this machine; the message says why."""


def build(
    compiler: str | None = None, cache: Path | None = None, source: Path = SOURCE, libraries: Sequence[str] = ()
) -> Path:
    """Compile a library, unless that was done before for this source, TensorFlow, compiler and options.

    Processes that build at the same time wait for a lock on the cache, so only the first one compiles. The library appears
    in the cache whole.

    Args:
        compiler: a C++ compiler and its own options, as in `"ccache g++"`; `None`: the environment's `CXX`, else `g++`.
        cache: the folder that keeps the library; it is made where there is none. `None`: `build/` beside the source, which
            git ignores.
        source: a single file.
        libraries: file names of what it needs of TensorFlow besides what every library of ops does.

    Returns:
        The path of the library.

    Raises:
        Unavailable: there is no such compiler, it failed, or the cache cannot be written.
    """
    cache = cache or source.with_name("build")
    command = [*shlex.split(compiler or os.environ.get("CXX", "") or "g++"), *_OPTIONS, str(source)]
    command += [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    command += [f"-l:{name}" for name in libraries]
    library = cache / f"{source.stem}-{_key(source, command)}.so"
    if library.exists():
        return library
    if shutil.which(command[0]) is None:
        raise Unavailable(
            f"{source.name} is compiled on first use, and there is no compiler {command[0]!r}; install g++, or name another "
            "one in CXX"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{source.stem}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                fresh = Path(folder) / library.name
                _compile(source.name, [*command, "-o", str(fresh)])
                os.replace(fresh, library)
    except OSError as error:
        raise Unavailable(f"{source.name} cannot be compiled into {cache}: {error}") from error
    return library


def _key(source: Path, command: list[str]) -> str:
    """What the library depends on, as a short name."""
    parts = (source.read_bytes(), tf.__version__, tf.version.GIT_VERSION, platform.machine(), *command)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _compile(name: str, command: list[str]) -> None:
    try:
        run = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"compiling {name} took more than {_TIMEOUT_SECONDS} seconds") from error
    output = command[command.index("-o") + 1]
    if run.returncode or not os.path.exists(output):
        raise Unavailable(f"{command[0]} could not compile {name} (exit code {run.returncode}): {_reason(run.stderr)}")


def _reason(messages: str) -> str:
    """The first error in a compiler's messages, else their last line."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "it gave no reason")
