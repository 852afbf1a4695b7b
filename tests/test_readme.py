"""The README's Python blocks run, one after another, as a program of a user's."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_code_runs(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    assert len(blocks) >= 5
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CPU:0 CPU None" in done.stdout


def test_every_option_is_in_the_table() -> None:
    from dataclasses import fields

    from devicemap.options import Options

    assert re.findall(r"^\| `(\w+)` \|", README.read_text(), re.M) == [field.name for field in fields(Options)]
