"""The floors of the package, what each imports, and the picture of it:
`python tests/house/floors.py` draws it anew.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Collection
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pyengine"
PICTURE = PACKAGE.parent / "docs" / "architecture.svg"
COMMAND = "python tests/house/floors.py"
# From the ground up.
FLOORS = [
    "ops",
    "comm",
    "wire",
    "window",
    "step",
    "gradients",
    "checkpoint",
    "audit",
    "data",
    "engine",
    "telemetry",
    "adapters",
    "cli",
]
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

_MARGIN, _BOX, _ROW, _HEIGHT, _CELL = 12, 400, 46, 40, 36
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #222 }
  .name { font: 600 14px ui-monospace, monospace }
  .paper { fill: #fff }
  .floor { fill: none; stroke: #555 }
  .may { fill: #e4e4e4 }
  .does { fill: #222 }
  @media (prefers-color-scheme: dark) {
    text, .does { fill: #ddd }
    .paper { fill: #1b1c1e }
    .floor { stroke: #999 }
    .may { fill: #3a3b3e }
  }
"""


@functools.cache
def imported(path: Path) -> list[tuple[str, int]]:
    """Return (dotted name, column) of every import of a module, which is named by its path in the package."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found += [(name, node.col_offset) for name in names]
    return found


def imported_floors(path: Path) -> list[tuple[str, int]]:
    """Return (folder of ours, column) of every import of a module."""
    return [(name.split(".")[1], column) for name, column in imported(path) if name.startswith("pyengine.")]


def edges() -> set[tuple[str, str]]:
    """Return (floor, other floor that it imports from)."""
    on_floors = [path for path in MODULES if path.parts[0] in FLOORS]
    found = {(path.parts[0], folder) for path in on_floors for folder, _ in imported_floors(path)}
    return {(floor, other) for floor, other in found if floor != other}


@functools.cache
def purpose(floor: str) -> str:
    """Return what a floor is for: the first clause of its docstring."""
    said = ast.get_docstring(ast.parse((PACKAGE / floor / "__init__.py").read_text())) or ""
    return re.split(r"; |: `|\.(?:\s|$)", said)[0]


def picture(edges: Collection[tuple[str, str]]) -> str:
    """Draw a box a floor, the ground at the bottom, and beside it what it imports from; return SVG."""
    left = _MARGIN + _BOX + _MARGIN
    width = left + len(FLOORS) * _CELL + _MARGIN
    height = 2 * _MARGIN + len(FLOORS) * _ROW
    lines = [f'<rect class="paper" width="{width}" height="{height}" rx="6"/>']
    for index, floor in enumerate(FLOORS):
        top = height - _MARGIN - (index + 1) * _ROW
        lines += _box(floor, top)
        for column, other in enumerate(FLOORS[:index]):
            lines += _cell(left + column * _CELL, top, is_imported=(floor, other) in edges)
        if index < len(FLOORS) - 1:  # under the column of those that may import it
            lines.append(f'<text class="name" x="{left + index * _CELL}" y="{top + 25}">{floor}</text>')
    lines += _legend(left + 3 * _CELL, height - _MARGIN - 2 * _ROW)
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                'role="img">'
            ),
            f"<!-- Drawn from the imports by `{COMMAND}`: not edited by hand. -->",
            "<title>The floors of pyengine and what each imports from</title>",
            f"<style>{_STYLE}</style>",
            *lines,
            "</svg>\n",
        ]
    )


def _box(floor: str, top: int) -> list[str]:
    words = _in_two_lines(purpose(floor))
    first = top + (24 if len(words) == 1 else 17)
    return [
        f'<rect class="floor" x="{_MARGIN}" y="{top}" width="{_BOX}" height="{_HEIGHT}" rx="4"/>',
        f'<text class="name" x="{_MARGIN + 12}" y="{top + 25}">{floor}</text>',
        *(
            f'<text x="{_MARGIN + 110}" y="{first + 15 * row}">{escape(line)}</text>'
            for row, line in enumerate(words)
        ),
    ]


def _in_two_lines(text: str) -> list[str]:
    """Cut a text into lines of about one length; what does not fit is cut off."""
    for width in range(30, 45):
        if len(lines := textwrap.wrap(text, width)) <= 2:
            return lines
    return textwrap.wrap(text, 44, max_lines=2, placeholder=" …")


def _cell(x: int, top: int, *, is_imported: bool) -> list[str]:
    cell = f'<rect class="may" x="{x}" y="{top}" width="{_CELL - 6}" height="{_HEIGHT}" rx="4"/>'
    dot = f'<circle class="does" cx="{x + (_CELL - 6) // 2}" cy="{top + _HEIGHT // 2}" r="6"/>'
    return [cell, dot] if is_imported else [cell]


def _legend(x: int, top: int) -> list[str]:
    lines = []
    meanings = [(True, "imports from the floor under the column"), (False, "may, and does not")]
    for row, (is_imported, text) in enumerate(meanings):
        y = top + row * _ROW
        lines += _cell(x, y, is_imported=is_imported)
        lines.append(f'<text x="{x + _CELL + 2}" y="{y + 24}">{text}</text>')
    return lines


if __name__ == "__main__":
    PICTURE.write_text(picture(edges()))
