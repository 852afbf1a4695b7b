"""The examples run as a user runs them, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python examples/digits.py *arguments` in the folder `cwd`, on this checkout, without GPUs."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "digits.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **settings},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run = _run("--images", "20", "--simulate", "2", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for words in (
        "CPU:0, used", "CPU:1, used", "20 images to 10 digits", "first call", "later calls", "images/s", "speed-up",
        "Python loop, eager", "tf.map_fn in a tf.function", "devicemap.parallel_map", "The answers agree", "Right: ",
    ):  # fmt: skip
        assert words in run.stdout
    assert (tmp_path / "output" / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_digits_says_how_many_images_there_are(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run = _run("--images", "0", cwd=tmp_path)
    assert run.returncode == 1
    assert "--images is 0; expected 1 to 1297" in run.stderr
