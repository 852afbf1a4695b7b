"""Find words in prose that the style of the project rules out: `python tools/words.py`, which `make lint` runs.

`words.txt` lists the words. Prose is Markdown outside of code blocks, and in Python comments and strings: docstrings and
messages. Strings of one word are names, not prose.
"""

from __future__ import annotations

import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = (
    "*.md", "docs/**/*.md", "tools/**/*.md", "benchmarks/**/*.md", "docs/*.py",
    *(f"{folder}/**/*.py" for folder in ("devicemap", "tests", "tools", "examples", "benchmarks")),
)  # fmt: skip
LINES = (ROOT / "tools" / "words.txt").read_text(encoding="utf-8").splitlines()
WORDS = dict(line.split("\t") for line in LINES if not line.startswith("#"))
"""Regular expression -> what to write instead."""

CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield texts, each with the number of its first line."""
    if path.suffix == ".md":
        yield 1, CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
        return
    middle = getattr(tokenize, "FSTRING_MIDDLE", None)  # the text in f-strings, since Python 3.12
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, middle) or (token.type == tokenize.STRING and " " in token.string):
                yield token.start[0], token.string


def findings(path: Path) -> Iterator[str]:
    """Yield a line for each word in a file that `WORDS` rules out."""
    for first, text in prose_of(path):
        for pattern, instead in WORDS.items():
            for found in re.finditer(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), text, re.IGNORECASE):
                line = first + text.count("\n", 0, found.start())
                yield f"{path.relative_to(ROOT)}:{line}: {' '.join(found[0].split())!r}; write {instead}"


def main() -> int:
    """Print all findings; return 1 if there are any."""
    found = [line for pattern in FILES for path in sorted(ROOT.glob(pattern)) for line in findings(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
