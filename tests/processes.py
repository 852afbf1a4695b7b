"""Programs in processes of their own, in which TensorFlow and Keras have been imported and have not started yet."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

SECONDS = 600
"""What hangs, hangs for ever."""

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tensorflow", "keras"])  # which takes seconds: once, instead of in each process


def run(source: str, *arguments: str, cwd: Path | None = None) -> list[str]:
    """The lines that a program prints, which has to end well. It is stored in a file, from which autograph reads it."""
    with TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(textwrap.dedent(source))
        process = forks.Process(target=_run, args=(folder, arguments, cwd))
        process.start()
        process.join(SECONDS)
        process.kill()
        process.join()
        assert process.exitcode == 0, Path(folder, "errors").read_text()
        return Path(folder, "output").read_text().splitlines()


def run_tests(*files: Path, options: Sequence[str] = ()) -> None:
    """Run test files of one folder, without the `conftest.py` of its parents."""
    source = """
        import contextlib, sys
        import pytest

        with contextlib.redirect_stdout(sys.stderr):
            sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
        """
    run(source, f"--confcutdir={files[0].parent}", *options, *map(str, files))


def _run(folder: str, arguments: tuple[str, ...], cwd: Path | None) -> None:
    for number, name in enumerate(("output", "errors"), 1):
        os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY), number)
    os.environ.pop("COLUMNS", None)  # texts have their default width
    os.chdir(cwd or ".")
    program = str(Path(folder, "program.py"))
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
