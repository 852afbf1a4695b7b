"""The examples run as a user runs them, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


PNG = b"\x89PNG"


def _run(example: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python examples/<example>.py *arguments` in the folder `cwd`, on this checkout, without GPUs."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **settings},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.mark.parametrize(
    ("simulate", "words_of_devices"),
    [
        ((), ["No GPU: the CPU is cut into 4 devices", "CPU:3, used", "on 4 devices"]),
        (("--simulate", "2"), ["on 2 devices"]),
    ],
    ids=["as it is", "two devices"],
)
def test_digits(simulate: tuple[str, ...], words_of_devices: list[str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run = _run("digits", "--images", "20", *simulate, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for words in (
        *words_of_devices,
        "CPU:0, used", "CPU:1, used", "20 images to 10 digits", "first call", "later calls", "images/s", "speed-up",
        "Python loop, eager", "tf.map_fn in a tf.function", "devicemap.DeviceMap", "The answers agree", "Right: ",
    ):  # fmt: skip
        assert words in run.stdout
    assert (tmp_path / "output" / "digits.png").read_bytes().startswith(PNG)


def test_digits_says_how_many_images_there_are(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run = _run("digits", "--images", "0", cwd=tmp_path)
    assert run.returncode == 1
    assert "--images is 0; expected 1 to 1297" in run.stderr


def test_integrals(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    run = _run("integrals", "--rows", "33", "--precision", "0.03", "--simulate", "8", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for words in ("33 integrals in 5 dimensions", "8 devices, a shard each", "Within one error of the truth: "):
        assert words in run.stdout
    assert "The same on 1 device and on 8 devices" in run.stdout
    assert (tmp_path / "output" / "integrals.png").read_bytes().startswith(PNG)


def test_inference(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run = _run("inference", "--pages", "12", "--epochs", "1", "--simulate", "3", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for words in ("12 pages of digits", "Right: ", "The answers are the model's own, page by page"):
        assert words in run.stdout
    assert (tmp_path / "output" / "inference.png").read_bytes().startswith(PNG)


def test_fitting(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    run = _run("fitting", "--rows", "5", "--simulate", "2", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for words in ("5 initial states on 2 device(s)", "death of predators", "0.4", "Squares per observation"):
        assert words in run.stdout
    assert (tmp_path / "output" / "fitting.png").read_bytes().startswith(PNG)


def test_inference_refuses_no_pages(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    run = _run("inference", "--pages", "0", cwd=tmp_path)
    assert run.returncode == 1
    assert "--pages 0 --epochs 8; expected at least 1 of each" in run.stderr
