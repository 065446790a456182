"""docs/errors.md has every message that a user can meet, in the words of the sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
# The page describes these by kind: ops, lazy devices, what the command line says of its arguments.
BY_KIND = {"rollback.py", "xla.py"}
MODULES = [
    path
    for path in sorted((ROOT / "pyengine").rglob("*.py"))
    if path.name not in BY_KIND and not {"ops", "cli", "adapters", "telemetry"} & set(path.parts)
]
RAISED = {"ValueError", "TypeError", "RuntimeError", "FloatingPointError", "AuditError"}


def _text(node: ast.expr) -> str:
    """Return a string expression with … for what is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    constants = (part.value if isinstance(part, ast.Constant) else "…" for part in parts)
    return re.sub("…+", "…", "".join(map(str, constants)))


def _strings(tree: ast.AST) -> list[str]:
    return [_text(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]


def _messages(path: Path) -> list[str]:
    """Return what a module raises, if it begins with words of its own."""
    raises = [node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
    calls = [exc for exc in raises if isinstance(exc, ast.Call) and exc.args]
    named = [exc for exc in calls if isinstance(exc.func, ast.Name) and exc.func.id in RAISED]
    return [_text(exc.args[0]) for exc in named if isinstance(exc.args[0], ast.JoinedStr | ast.Constant)]


ENTRIES = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)
SAID = "\n".join(
    text
    for path in sorted((ROOT / "pyengine").rglob("*.py"))
    for text in _strings(ast.parse(path.read_text()))
)


def _unread() -> list[str]:
    """Return the lines among the rows of a table that are neither a row nor a table's head."""
    tables = re.findall(r"(?:^.+\n)*^\|.*\n(?:^.+\n)*", PAGE + "\n", re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [line for line in lines if not re.fullmatch(r"\| (`.+?`|message) \|.*\||[|-]+", line)]


def _pattern(entry: str) -> str:
    return ".*?".join(map(re.escape, entry.split("…")))


def test_every_line_of_a_table_is_a_row_that_this_test_reads():
    assert _unread() == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_message_of_the_page_is_in_the_sources(entry):
    assert re.search(_pattern(entry), SAID)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "pyengine")))
def test_every_message_of_a_module_is_on_the_page(path):
    words = [message for message in _messages(path) if re.search(r"[a-z]{3}", message)]
    assert [text for text in words if not any(re.match(_pattern(entry), text) for entry in ENTRIES)] == []
