"""A folder is a floor: a module imports from its own folder or from those below it, never upwards,
and never late.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from floors import FLOORS, MODULES, PACKAGE, imported_floors

ROOT = {"__init__", "__main__"}  # above all floors
LATE = {
    "__init__.py",  # the command's signals, in the command line's own process alone
    "comm/__init__.py",
    "cli/main.py",
    "ops/native.py",
}  # torch_xla, one command's packages, the extension: may be absent


def test_folders_are_the_floors_and_nothing_lies_beside_them():
    found = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert found - {"__pycache__"} == {*FLOORS, *ROOT}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.stem not in ROOT or path.parent.name], ids=str
)
def test_a_module_imports_only_from_its_floor_or_below(path):
    floor = FLOORS.index(path.parts[0])
    assert [folder for folder, _ in imported_floors(path) if folder not in FLOORS[: floor + 1]] == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_of_ours_stand_at_the_top(path):
    assert str(path) in LATE or all(column == 0 for _, column in imported_floors(path))


def test_importing_the_package_is_lean():
    code = (
        "import sys, threading, pyengine; assert threading.active_count() == 1; "
        "heavy = {'numpy.f2py', 'torch_xla', 'accelerate', 'lightning', "
        "'transformers', 'tensorboard', 'wandb', 'rich', 'sklearn', 'pyengine.cli'};import "
        "torch.distributed as d; assert not d.is_initialized(); print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
