"""The floors of the package, and what its modules import."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyengine"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
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


@cache
def imported(module: Path) -> list[tuple[str, bool]]:
    """Return (dotted name, whether it is imported at the top of the file) of every import of a module."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", node.col_offset == 0) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, node.col_offset == 0) for alias in node.names]
    return found


def imported_floors(module: Path) -> set[str]:
    """Return the folders of ours that a module imports from."""
    return {name.split(".")[1] for name, _ in imported(module) if name.startswith("pyengine.")}
