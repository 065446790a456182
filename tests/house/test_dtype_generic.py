"""No module of the engine makes a tensor in the default dtype, which `torch.set_default_dtype` changes."""

from __future__ import annotations

import ast

import pytest
from floors import MODULES, PACKAGE

FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def _without_dtype(source: str) -> list[str]:
    """Return the calls of torch's factory functions that leave out `dtype`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg == "dtype" for keyword in node.keywords)
    ]


@pytest.mark.parametrize("module", [path for path in MODULES if path.parts[0] != "cli"], ids=str)
def test_a_module_gives_every_new_tensor_a_dtype(module):
    assert _without_dtype((PACKAGE / module).read_text()) == []


@pytest.mark.parametrize("code", ["torch.ones((), device=d)", "torch.tensor(x)", "f(torch.full((), 2.0))"])
def test_a_tensor_of_the_default_dtype_is_found(code):
    assert len(_without_dtype(code)) == 1


@pytest.mark.parametrize("code", ["torch.ones((), dtype=t)", "torch.ones_like(x)", "x.new_zeros(3)"])
def test_a_tensor_with_a_dtype_is_not_found(code):
    assert _without_dtype(code) == []
