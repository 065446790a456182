"""Every message on docs/errors.md is in the sources, word for word; … stands for what is filled in."""

from __future__ import annotations

import ast
import re

import pytest
from pages import ROOT

ENTRIES = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    """Return a string of the sources with … for what is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


STRINGS = "\n".join(
    _text(node)
    for path in sorted((ROOT / "pyengine").rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.JoinedStr | ast.Constant)
)


def test_the_page_has_messages():
    assert len(ENTRIES) > 50


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_message_of_the_page_is_in_the_sources(entry):
    assert re.search(".*?".join(map(re.escape, entry.split("…"))), STRINGS)
