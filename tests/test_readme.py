"""The Python blocks of the README and of `docs/` run, those of a page one after another, as a program of a user's."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


def _blocks(page: pathlib.Path) -> list[str]:
    """The Python code of a page; every other kind of block says what it is."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(.*)$", text, re.M)
    assert all(kind in ("python", "console", "text") for kind in fences[::2]), fences
    assert not any(fences[1::2]), fences
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def test_the_code_runs(tmp_path: pathlib.Path) -> None:
    blocks = _blocks(README)
    assert len(blocks) >= 5
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CPU:0 CPU None" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_run(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    program = tmp_path / f"{page.stem}_page.py"  # a file, since autograph reads the source of what it converts
    blocks = _blocks(page)
    assert blocks or page.stem in ("gallery", "index", "internals", "reference")
    program.write_text("\n".join(blocks), encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    done = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # what a page shows, its code asserts


def test_pages_are_linked() -> None:
    """From the index, and all links between files of this repository lead somewhere."""
    assert {page.stem for page in PAGES} >= {"index", "streaming", "state", "faults"}
    for page in (README, *PAGES):
        links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        for link in links:
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
        if page.stem == "index":
            assert {other.name for other in PAGES if other != page} <= {*links}


def test_every_option_is_in_the_table() -> None:
    from dataclasses import fields

    from devicemap.base.options import Options

    assert re.findall(r"^\| `(\w+)` \|", README.read_text(), re.M) == [field.name for field in fields(Options)]
