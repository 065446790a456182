"""The modules of the package, the documentation pages, and their code: fenced blocks and `spans`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyengine"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md")
]
PAGES += sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"^( *)```(\S*)[^`\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line at which its code begins, its language, and its code."""

    page: str
    line: int
    language: str
    code: str

    @property
    def is_doctest(self) -> bool:
        """Whether the code is an interactive session with `>>>` prompts."""
        return self.code.startswith(">>>")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    """Return a page's path relative to the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(language: str | None = None) -> list[Block]:
    """Return the blocks of all pages, or only those of one language."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            found.append(Block(name_of(page), line, match[2], match[3]))
    return [block for block in found if language in (None, block.language)]


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """Return the code between backticks in a page's prose, with the bars of tables unescaped."""
    return [span.replace("\\|", "|") for span in _SPAN.findall(prose(page))]
