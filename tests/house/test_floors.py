"""The house of DESIGN.md §8: a module imports from its own floor or lower ones, never upwards, and never late."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pyengine"
FLOORS = [
    {"_core", "_cuda", "_exact", "_exact_reference", "_native", "_pointers", "_ops", "_reference", "trace"},
    {
        "batch",
        "buffers",
        "dealer",
        "host",
        "layout",
        "window",
        "record",
        "watch",
        "sampler",
        "scalars",
        "seed",
    },
    {"accumulator", "batch_norm", "norm", "rollback", "wire"},
    {"comm"},
    {
        "header",
        "report",
        "agreement",
        "carry",
        "restore",
        "snapshot",
        "transfers",
        "outcomes",
        "verdict",
        "reducer",
        "hook",
        "ddp",
        "ddp_sums",
        "drop_in",
        "engine",
        "grad_sync",
        "loop",
        "optimizer",
        "sync",
        "xla",
    },
    {"adapters", "telemetry", "launching", "cli", "__main__", "__init__"},
]
LATE = {"comm/__init__.py", "cli/main.py", "_native.py"}  # _native: the extension may be absent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def _noun(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def _floor(noun: str) -> int:
    return next(number for number, nouns in enumerate(FLOORS) if noun in nouns)


def _imports(path: Path) -> list[tuple[str, int]]:
    """Return (noun of ours, column) of every import in a module."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "pyengine" else [f"pyengine.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found += [(name.split(".")[1], node.col_offset) for name in names if name.startswith("pyengine.")]
    return found


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_only_from_its_floor_or_below(path):
    assert [
        noun for noun, _ in _imports(path) if _noun(Path(noun)) and _floor(noun) > _floor(_noun(path))
    ] == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_of_ours_stand_at_the_top(path):
    assert str(path) in LATE or all(column == 0 for _, column in _imports(path))


def test_importing_the_package_is_lean():
    code = (
        "import sys, pyengine; heavy = {'numpy.f2py', 'torch_xla', 'accelerate', 'lightning', 'transformers', "
        "'tensorboard', 'wandb', 'rich', 'sklearn'};"
        "import torch.distributed as d; assert not d.is_initialized(); print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
