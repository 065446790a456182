"""Claims of SECURITY.md; ruff's S rules find pickles, shells, `exec` and temporary files in the sources."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from pages import ROOT, name_of

SOURCES = [
    path for folder in ("pyengine", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
]
ADAPTERS = sorted(path.stem for path in (ROOT / "pyengine" / "adapters").glob("[a-z]*.py"))


def test_the_page_names_every_module_that_unpickles():
    named = re.findall(r"^\| `(pyengine/.*\.py)` \|", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert {name_of(path) for path in SOURCES if "noqa: S301" in path.read_text()} == set(named)


def test_every_file_is_loaded_with_weights_only():
    paths = [*SOURCES, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    calls = [call for path in paths for call in re.findall(r"[=[(] ?torch\.load\((.*)", path.read_text())]
    assert calls and [call for call in calls if "weights_only=True" not in call] == []


def _inherited(cls: type) -> Iterator[str]:
    """Yield the source of each method that a class inherits from another package."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in ("pyengine", "builtins"):
            for name, method in vars(base).items():
                function = getattr(method, "__func__", method)
                if inspect.getattr_static(cls, name) is method and inspect.isfunction(function):
                    yield inspect.getsource(function)


def test_no_inherited_method_of_an_adapter_unpickles():
    sources = []
    for name in ADAPTERS:
        module = importlib.import_module(f"pyengine.adapters.{name}")
        for each in vars(module).values():
            if isinstance(each, type) and each.__module__ == module.__name__:
                sources += _inherited(each)
    assert sources
    assert [source for source in sources if re.search(r"weights_only=False|pickle\.loads?\(", source)] == []
