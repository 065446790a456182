"""SECURITY.md and the sources say the same; nothing that is read is run."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("pyengine", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PAGE = (ROOT / "SECURITY.md").read_text()
UNPICKLES = set(re.findall(r"^\| `(pyengine/.*\.py)` \|", PAGE, re.MULTILINE))
# They run what they are given, or write where a name can be guessed.
NEVER = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.Unpickler",
    "marshal.loads",
    "shelve.open",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
    "mktemp",
    "yaml.load",
}


def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), call) for call in calls]


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_named)
def test_nothing_runs_what_it_reads(path):
    calls = _calls(path)
    assert [name for name, _ in calls if name in NEVER] == []
    for name, call in calls:
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        assert options.get("shell", "False") == "False"
        if name == "torch.load":
            assert options.get("weights_only") == "True"
    assert "'/tmp" not in path.read_text() and '"/tmp' not in path.read_text()


def _inherited(cls: type) -> Iterator[tuple[str, str]]:
    """Return the methods that a class has from other packages, by name and as source."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in ("pyengine", "builtins"):
            for name, method in vars(base).items():
                is_used = inspect.getattr_static(cls, name) is method
                if is_used and inspect.isfunction(function := getattr(method, "__func__", method)):
                    yield f"{cls.__qualname__}.{name}", inspect.getsource(function)


@pytest.mark.parametrize("path", sorted((ROOT / "pyengine" / "adapters").glob("[a-z]*.py")), ids=_named)
def test_no_inherited_method_runs_what_it_reads(path):
    module = importlib.import_module(f"pyengine.adapters.{path.stem}")
    classes = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    methods = [each for cls in classes if isinstance(cls, type) for each in _inherited(cls)]
    unpickles = re.compile(r"weights_only=False|pickle\.loads?\(")
    assert [name for name, source in methods if unpickles.search(source)] == []


def test_the_page_names_every_module_that_unpickles():
    found = {_named(path) for path in SOURCES for name, _ in _calls(path) if name.endswith("pickle.loads")}
    assert found == UNPICKLES


def test_the_pages_examples_load_weights_only():
    text = "\n".join(
        path.read_text() for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *SOURCES]
    )
    calls = re.findall(r"(?:=|\[|\() ?torch\.load\(([^\n]*?)\)(?: |\n|\)|$)", text)
    assert calls and all("weights_only=True" in call for call in calls), calls
