"""Each Python block of the README and of `docs/` is a program of its own, and the `text` block after it is what it prints."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import processes
import pytest

import devicemap
from devicemap.options import Options

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
NIGHTLY = {DOCS / "how-to" / name for name in ("ray.md", "several-machines.md")}
"""Pages that start other processes, which import TensorFlow."""

FENCE = re.compile(r"^ *```(.*)$", re.M)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def _snippets() -> Iterator[Any]:
    """Programs with their output, which is empty if no `text` block follows. `make check` runs the first of a page."""
    for page in (README, *PAGES):
        text = page.read_text(encoding="utf-8")
        blocks = [*BLOCK.finditer(text)]
        nightly = page in NIGHTLY
        for block, following in zip(blocks, [*blocks[1:], None]):
            if block[1] == "python":
                output = following[2] if following is not None and following[1] == "text" else ""
                name = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 1}"
                yield pytest.param(page, block[2], output, id=name, marks=[pytest.mark.nightly] * nightly)
                nightly = nightly or page.stem != "quickstart"


@pytest.mark.parametrize(("page", "program", "output"), _snippets())
def test_snippets_run_alone(
    page: pathlib.Path, program: str, output: str, tmp_path: pathlib.Path, pytestconfig: pytest.Config
) -> None:
    printed = "".join(f"{line}\n" for line in processes.run(program, cwd=tmp_path))
    if pytestconfig.getoption("update_messages"):
        before, after = (f"{program}```\n\n```text\n{text}```\n" for text in (output, printed))
        page.write_text(page.read_text("utf-8").replace(before, after), "utf-8")
    else:
        assert printed == output


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_blocks_name_their_kind(page: pathlib.Path) -> None:
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    assert {*fences[::2]} <= {"python", "console", "text", "diff"}
    assert not any(fences[1::2])


def test_pages_are_linked() -> None:
    """From the index, and all links between files of this repository lead somewhere."""
    for page in (README, *PAGES, *(DOCS / "notebooks").glob("*.ipynb")):
        links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        for link in links:
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
        if page == DOCS / "index.md":
            assert {*PAGES} - {page} <= {page.parent / link for link in links}


def test_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {devicemap.__version__}\n" in citation


def test_every_option_is_in_the_table() -> None:
    page = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [field.name for field in fields(Options)]


def _texts_of_the_package() -> Iterator[str]:
    """The strings in the code of devicemap, without the values in f-strings."""
    for path in (ROOT / "devicemap").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_every_message_of_the_page_exists() -> None:
    """In the golden file of messages or, for errors that it leaves out, in the code."""
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    golden = (ROOT / "tests" / "messages.txt").read_text(encoding="utf-8")
    known = "\n".join([golden, *_texts_of_the_package()])
    quoted = [part for row in re.findall(r"^\| (`.*?) \|", page, re.M) for part in re.findall("`(.*?)`", row)]
    parts = [part.strip() for message in quoted for part in message.split("…")]
    assert len(parts) > 40
    assert [part for part in parts if part not in known] == []
