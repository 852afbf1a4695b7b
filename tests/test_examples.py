"""The examples run as a user runs them, several in one process where they are given as many devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
RUN_ALL = """
import contextlib, io, json, runpy, sys, traceback

ended = []
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv, error = [f"EXAMPLES/{name}.py", *arguments], ""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except (Exception, SystemExit):
            error = traceback.format_exc()
    ended.append((said.getvalue(), error))
print(json.dumps(ended))
""".replace("EXAMPLES", str(EXAMPLES))

DIGITS = (
    "20 held-out images", "plain distance", "warped distance", "First call: ", "Median seconds: ", "tf.map_fn",
    "Gain from vectorisation: ", "Gain from devices: ", "The last call: ",
)  # fmt: skip
AS_IT_IS = {"digits --images 20": ("No GPU: the CPU is cut into", "one per core", *DIGITS)}
ON_TWO_DEVICES = {
    "digits --images 20 --simulate 2": ("on 2 devices", *DIGITS),
    "integrals --rows 17 --precision 0.05 --simulate 2": (
        "17 integrals in 5 dimensions", "2 devices, no options", "Within one error of the truth: ",
        "The same on 1 device and on 2 devices", "none of them kept",
    ),
    "inference --pages 6 --epochs 1 --simulate 2": (
        "6 pages of digits", "Right: ", "The answers are the model's own, page by page",
    ),
    "fitting --rows 5 --simulate 2": (
        "5 initial states on 2 device(s)", "death of predators", "0.4", "Squares per observation",
    ),
    "large --epochs 1 --simulate 2": (
        "one device: 11", "CPU:0: 5", "CPU:1: 6", "MiB of variables", "in the last, on 2 devices",
    ),
    "grid --epochs 1 --simulate 2": ("rate 0.1", "12 models on 2 devices", "is as good when it is trained alone"),
    "training --epochs 1 --simulate 2": ("On one device: loss ", "On all devices: loss ", "after each of 1 epochs agree"),
}  # fmt: skip
ON_RAY = {"images --images 12": ("12 images, each once", "of the same photograph")}
REFUSED = {
    "digits --images 0 --simulate 2": "SystemExit: --images is 0; expected 1 to 1000",
    "training --epochs 0": "SystemExit: --epochs is 0; expected at least 1",
    "large --epochs 0": "SystemExit: --epochs is 0; expected at least 1",
    "inference --pages 0": "SystemExit: --pages 0 --epochs 8; expected at least 1 of each",
}


@pytest.mark.parametrize(
    ("wanted", "refused"),
    [
        pytest.param(AS_IT_IS, {}, id="as it is"),
        pytest.param(ON_TWO_DEVICES, REFUSED, id="on two devices", marks=pytest.mark.nightly),
        pytest.param(
            ON_RAY, {"images --actors 0": "SystemExit: --images 400 --actors 0"}, id="on Ray", marks=pytest.mark.nightly
        ),
    ],
)
def test_examples(wanted: dict[str, tuple[str, ...]], refused: dict[str, str], tmp_path: Path) -> None:
    """Each says what it found, and draws it; or ends with what it expected."""
    for package in ("sklearn", "matplotlib", "rich", "scipy", *["ray.data"] * (wanted is ON_RAY)):
        pytest.importorskip(package)
    path = os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    commands = json.dumps([command.split() for command in (*wanted, *refused)])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, commands],
        cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, encoding="utf-8", timeout=300, check=True,
    )  # fmt: skip
    ended = dict(zip((*wanted, *refused), json.loads(done.stdout)))
    for command, words in wanted.items():
        said, error = ended[command]
        assert not error, f"{command}: {error}"
        assert not [each for each in words if each not in said], f"{command}: {said}"
        if "Picture: " in said:  # grid.py draws none
            picture = tmp_path / "output" / f"{command.split()[0]}.png"
            assert picture.read_bytes().startswith(b"\x89PNG")
    for command, words in refused.items():
        assert words in ended[command][1], command
