"""The extension's stub matches the bindings in csrc/python*.cpp; mypy (`make check`) relies on the stub."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from pages import PACKAGE

from pyengine.ops import native

CUDA_ONLY = ("CudaPlan", "INLINE_SLOTS", "MOST_INLINE_SLOTS", "load_kernels", "uploaded")


def _of_stub(body: list[ast.stmt]) -> dict[str, Any]:
    """Return every name with a class's names, a function's number of arguments, or None for anything else."""
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = None
        elif isinstance(node, ast.ClassDef):
            found[node.name] = _of_stub(node.body)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = None if node.decorator_list else len(node.args.posonlyargs)
    return found


def _of_extension(owner: object) -> dict[str, Any]:
    """Return the same for the extension, whose signatures pybind11 writes into docstrings."""
    found: dict[str, Any] = {}
    for name, value in vars(owner).items():
        if isinstance(value, type):
            found[name] = _of_extension(value)
        elif not name.startswith("_") or (isinstance(owner, type) and name in ("__init__", "__call__")):
            signature = (value.__doc__ or "").partition("\n")[0]
            found[name] = len(re.findall(r"\b(?:self|arg\d+): ", signature)) if callable(value) else None
    return found


@pytest.mark.skipif(native.core() is None, reason="built without the extension")
def test_the_stub_has_the_names_and_arguments_of_the_extension():
    core = native.core()
    stub = _of_stub(ast.parse((PACKAGE / "ops" / "_core.pyi").read_text()).body)
    if core.has_cuda:  # CUDA ops take a stream before the arguments of the CPU ops
        ops = {name: num + 1 for name, num in stub["BucketPlan"].items() if re.fullmatch(r"[a-z]\w+_", name)}
        del stub["CudaPlan"]["__getattr__"]
        stub["CudaPlan"] |= ops
        stub |= {f"{name}_cuda": num + 1 for name, num in stub.items() if name.startswith("codec_")}
    else:
        stub = {name: what for name, what in stub.items() if name not in CUDA_ONLY}
    assert _of_extension(core) == stub
