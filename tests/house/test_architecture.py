"""A folder of the package is a floor: it imports only from lower floors, as docs/architecture.md shows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pages import MODULES, PACKAGE, ROOT

ABOVE = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}  # above all floors
LATE = {
    "__init__.py",  # signal handlers, only in the process of a command
    "comm/__init__.py",  # torch_xla, which may be absent
    "cli/main.py",  # packages that only one command needs
    "cli/trackers.py",  # tensorboard, which may be absent
    "ops/native.py",  # the extension
}
# The page's table, lowest floor first. Each row is a floor, its imports, and imports that it must not have.
TABLE = re.findall(
    r"^\| `(\w+)` \|[^|]+\|([^|]*)\|([^|]+)\|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
)
FLOORS = [floor for floor, *_ in TABLE]


@cache
def _imports(module: Path) -> list[tuple[str, bool]]:
    """Return (dotted name, whether it is imported at the top of the file) of every import of a module."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", node.col_offset == 0) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, node.col_offset == 0) for alias in node.names]
    return found


def _imports_of(floor: str) -> list[str]:
    return [name for module in MODULES if module.parts[0] == floor for name, _ in _imports(module)]


def test_folders_are_the_floors_and_nothing_is_beside_them():
    assert {path.name for path in PACKAGE.iterdir()} - ABOVE == set(FLOORS)


@pytest.mark.parametrize(("floor", "shown", "excluded"), TABLE, ids=FLOORS)
def test_a_floor_imports_what_the_page_shows_and_only_from_below(floor, shown, excluded):
    imports = _imports_of(floor)
    ours = {name.split(".")[1] for name in imports if name.startswith("pyengine.")} - {floor}
    assert ours == set(re.findall(r"`(\w+)`", shown)) <= set(FLOORS[: FLOORS.index(floor)])
    for name in re.findall(r"`([^`]+)`", excluded):
        prefix = f"pyengine.{name}." if name in FLOORS else f"{name}."
        assert [each for each in imports if f"{each}.".startswith(prefix)] == []


def test_imports_of_ours_are_at_the_top_of_the_file():
    late = {
        str(module)
        for module in MODULES
        for name, is_at_top in _imports(module)
        if name.startswith("pyengine.") and not is_at_top
    }
    assert late <= LATE


@pytest.mark.slow
def test_importing_the_package_is_lean():
    code = (
        "import sys, threading, pyengine; assert threading.active_count() == 1; "
        "import torch.distributed as d; assert not d.is_initialized(); "
        "heavy = {'numpy.f2py', 'torch_xla', 'accelerate', 'lightning', 'transformers', 'tensorboard', "
        "'wandb', 'rich', 'sklearn', 'pyengine.cli'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
