"""No module of the engine makes a tensor in the default dtype or on the default device of torch."""

from __future__ import annotations

import ast

import pytest
from floors import MODULES, PACKAGE

# What a call leaves to a default unless it names it.
BOTH = {"dtype", "device"}
FACTORIES = {
    **dict.fromkeys(["arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"], BOTH),
    **dict.fromkeys(["linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"], BOTH),
    "randint": {"device"},
    "randperm": {"device"},
    "sparse_coo_tensor": {"device"},
}


def _by_default(source: str) -> list[str]:
    """Return the calls of torch's factory functions that leave out `dtype` or `device`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not FACTORIES.get(node.func.attr, set()) <= {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize("module", [path for path in MODULES if path.parts[0] != "cli"], ids=str)
def test_a_module_gives_every_new_tensor_a_dtype_and_a_device(module):
    assert _by_default((PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    "code", ["torch.ones((), device=d)", "torch.zeros(3, dtype=t)", "f(torch.tensor(x))", "torch.randperm(3)"]
)
def test_a_tensor_of_a_default_is_found(code):
    assert len(_by_default(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "torch.ones((), dtype=t, device=d)",
        "torch.ones_like(x)",
        "x.new_zeros(3)",
        "torch.randperm(3, device=d)",
    ],
)
def test_a_tensor_of_no_default_is_not_found(code):
    assert _by_default(code) == []
