"""Adapters reach the engine by its public methods, and a library's insides by the few names listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from floors import MODULES, PACKAGE

ADAPTERS = [path for path in MODULES if path.parts[0] == "adapters"]
# What no public method of the library does; a release that is added to the extra has to have them.
OF_THE_LIBRARY = {
    # tells a model prepared for evaluation from a new one; holds the scaler of an engine that is closed
    "accelerate.py": {"_is_accelerate_prepared", "_custom_objects"},
    "lightning_optimization.py": {"_after_closure"},  # runs the hooks before a step
}


def _reached(tree: ast.AST) -> Iterator[str]:
    """Return every private name that is looked up on something that is not the object itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            looked_up, name = node.args[:2]
            if isinstance(name, ast.Constant) and _is_private(name.value) and not _is_own(looked_up):
                yield name.value


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@pytest.mark.parametrize("path", ADAPTERS, ids=str)
def test_an_adapter_looks_into_nothing_but_what_is_listed(path):
    reached = set(_reached(ast.parse((PACKAGE / path).read_text())))
    assert reached == OF_THE_LIBRARY.get(path.name, set())


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("self.sync._engine.resize(3)", "_engine"),
        ("getattr(self.sync, '_engine')", "_engine"),
        ("setattr(model, '_seen', True)", "_seen"),
    ],
)
def test_a_look_into_another_object_is_found(code, name):
    assert list(_reached(ast.parse(code))) == [name]


@pytest.mark.parametrize(
    "code", ["self._x", "super()._x()", "cls._x", "model.__class__", "getattr(self, '_x')"]
)
def test_what_is_the_objects_own_is_not(code):
    assert list(_reached(ast.parse(code))) == []
