"""What MkDocs asks for when it builds the site: which files are on it, and what no page may have."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SHOWN = (
    "*.md",
    "docs/**/*.md",
    "docs/pictures/*",
    "docs/notebooks/*.ipynb",
    "benchmarks/**/*.md",
    "tools/**/*.md",
)
CODE = ("examples/*.py", "benchmarks/*.py", "benchmarks/*.cc")
FAULTS = {
    "fetches from elsewhere": r'<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^"\s>]+)',
    "has an example that is in no section `Examples:`": r"<blockquote>\s*<blockquote>\s*(.*)",
}
_log = logging.getLogger("mkdocs.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the repository's files where they are in it, so that a link leads to the same place here and there.

    Code is a page that the search leaves out.
    """
    shown = {path.relative_to(ROOT).as_posix(): path for pattern in SHOWN for path in sorted(ROOT.glob(pattern))}
    pages = [File.generated(config, name, abs_src_path=str(path)) for name, path in shown.items()]
    for path in (path for pattern in CODE for path in sorted(ROOT.glob(pattern))):
        kind = {".py": "python", ".cc": "c++"}[path.suffix]
        text = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.name}\n\n```{kind}\n{path.read_text(encoding='utf-8')}```\n"
        pages.append(File.generated(config, f"{path.relative_to(ROOT).as_posix()}.md", content=text))
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *pages])  # the theme's, and these


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to code lead to its page."""
    return re.sub(r"(\]\((?!https?:)[^)#]+\.(?:py|cc))\)", r"\1.md)", markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Faults of a page are warnings, which end a strict build."""
    for fault, pattern in FAULTS.items():
        for found in re.findall(pattern, output):
            _log.warning(f"{page.file.src_uri} {fault}: {found}")
    return output
