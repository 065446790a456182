"""A folder of the package is a floor: it imports from itself and from floors below. docs/architecture.md
shows the same floors.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from floors import FLOORS, MODULES, PACKAGE, imported, imported_floors
from pages import ROOT

ABOVE = {"__init__", "__main__"}  # above all floors
LATE = {
    "__init__.py",  # the command's signals, in the process of the command line alone
    "comm/__init__.py",  # torch_xla, which may be absent
    "cli/main.py",  # the packages of one command
    "cli/trackers.py",  # tensorboard, which may be absent
    "ops/native.py",  # the extension
}
TABLE = re.findall(
    r"^\| `(\w+)` \|[^|]+\|([^|]*)\|([^|]+)\|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
)
IMPORTS_NOT = [(floor, name) for floor, _, names in TABLE for name in re.findall(r"`([^`]+)`", names)]


def _modules(floor: str) -> list[Path]:
    return [module for module in MODULES if module.parts[0] == floor]


def test_folders_are_the_floors_and_nothing_is_beside_them():
    found = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert found - {"__pycache__"} == {*FLOORS, *ABOVE}


def test_modules_import_only_from_their_floor_or_below():
    wrong = {}
    for index, floor in enumerate(FLOORS):
        above = set(FLOORS[index + 1 :])
        wrong |= {str(module): imported_floors(module) & above for module in _modules(floor)}
    assert {module: floors for module, floors in wrong.items() if floors} == {}


def test_imports_of_ours_are_at_the_top_of_the_file():
    late = {
        str(module)
        for module in MODULES
        for name, is_at_top in imported(module)
        if name.startswith("pyengine.") and not is_at_top
    }
    assert late <= LATE


def test_the_page_shows_the_floors_and_what_each_imports():
    real = {floor: set().union(*map(imported_floors, _modules(floor))) for floor in FLOORS}
    expected = [
        (floor, ", ".join(f"`{other}`" for other in FLOORS if other in real[floor] - {floor}))
        for floor in FLOORS
    ]
    assert [(floor, imports.strip()) for floor, imports, _ in TABLE] == expected


def test_a_floor_does_not_import_what_the_page_excludes():
    found = []
    for floor, name in IMPORTS_NOT:
        excluded = f"pyengine.{name}." if name in FLOORS else f"{name}."
        imports = [(str(module), each) for module in _modules(floor) for each, _ in imported(module)]
        found += [(module, each) for module, each in imports if f"{each}.".startswith(excluded)]
    assert IMPORTS_NOT and found == []


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
