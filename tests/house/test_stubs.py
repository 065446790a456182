"""The stub of the extension matches what csrc/python*.cpp bind; mypy (`make check`) relies on the stub."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pyengine.ops import native

STUB = Path(__file__).parents[2] / "pyengine" / "ops" / "_core.pyi"
CUDA_ONLY = {
    "CudaPlan", "INLINE_SLOTS", "MOST_INLINE_SLOTS", "load_kernels", "uploaded",
    "codec_encode_cuda", "codec_sum_encode_cuda", "codec_sum_cuda",
}  # fmt: skip


def _said() -> dict[str, int | None]:
    """Return every name of the stub, methods as Class.method, with its number of arguments;
    None if it is no function.
    """
    said: dict[str, int | None] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.AnnAssign):
            said[ast.unparse(node.target)] = None
        elif isinstance(node, ast.FunctionDef):
            said[node.name] = len(node.args.posonlyargs)
        elif isinstance(node, ast.ClassDef):
            said[node.name] = None
            for method in node.body:
                assert isinstance(method, ast.FunctionDef)
                num = None if method.decorator_list else len(method.args.posonlyargs)
                said[f"{node.name}.{method.name}"] = num
    return said


def _bound(core: object) -> dict[str, int | None]:
    """Return the same of the extension: pybind11 writes signatures into docstrings."""
    bound = {name: _arguments(getattr(core, name)) for name in _names(core)}
    for kind in [name for name in bound if isinstance(getattr(core, name), type)]:
        members = vars(getattr(core, kind))
        bound |= {f"{kind}.{name}": _arguments(members[name]) for name in _names(getattr(core, kind))}
    return bound


def _names(owner: object) -> list[str]:
    own = [name for name in vars(owner) if not name.startswith("_")]
    return own + [
        name for name in ("__init__", "__call__") if isinstance(owner, type) and name in vars(owner)
    ]


def _arguments(value: object) -> int | None:
    if not callable(value) or isinstance(value, type):
        return None
    return len(re.findall(r"\b(?:self|arg\d+): ", (value.__doc__ or "").splitlines()[0]))


@pytest.mark.skipif(native.core() is None, reason="built without the extension")
def test_the_stub_has_the_names_and_arguments_of_the_extension():
    core = native.core()
    said, bound = _said(), _bound(core)
    if not core.has_cuda:
        said = {name: num for name, num in said.items() if name.partition(".")[0] not in CUDA_ONLY}
    assert bound == said
