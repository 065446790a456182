"""The engine runs on any device of torch.distributed, under any default dtype and device of torch: no module
names a device, except those listed here, and every new tensor gets a dtype and a device.
"""

from __future__ import annotations

import ast
import re

import pytest
from floors import MODULES, PACKAGE

DEVICES = "cpu|cuda|xla|tpu|mps|xpu|hpu|npu"
# Which modules may, and why.
ALLOWED = {
    "ops/cuda.py": "binds the CUDA kernels",
    "ops/native.py": "passes the core the dispatch keys of tensors that it can address",
    "ops/pointers.py": "distinguishes memory that the core can address",
    "ops/plan.py": "chooses between the kernels of the core and reference.py",
    "ops/codec.py": "the same",
    "ops/device.py": "the one place that knows what a kind of device can do",
    "ops/trace.py": "NVTX is CUDA's own",
    "engine/window_graph.py": "graphs are torch.cuda's",
    "data/rng.py": "seeds every generator that there is, XLA's too",
    "checkpoint/checkpoints.py": "ranks exchange what files hold, which the host has read",
    "checkpoint/loading.py": "a file is read into the host's memory",
    "comm/shared_memory.py": "NCCL's memory pools are torch.cuda's",
    "comm/xla.py": "torch_xla's transport: what its CPU backend cannot reduce",
}
ENGINE = [str(module) for module in MODULES if module.parts[0] != "cli"]
# What a call leaves to a default of torch unless it names it.
BOTH = {"dtype", "device"}
FACTORIES = {
    **dict.fromkeys(["arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"], BOTH),
    **dict.fromkeys(["linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"], BOTH),
    "randint": {"device"},
    "randperm": {"device"},
    "sparse_coo_tensor": {"device"},
}


def _code(source: str) -> str:
    """Return a module without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def _devices(source: str) -> list[str]:
    return re.findall(
        rf"(?i)'(?:{DEVICES})(?::[^']*)?'|\btorch\.(?:{DEVICES})\b|\.is_(?:{DEVICES})\b", _code(source)
    )


def _by_default(source: str) -> list[str]:
    """Return the calls of torch's factory functions that leave out `dtype` or `device`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if (name := ast.unparse(call.func)).startswith("torch.")
        and not FACTORIES.get(name[6:], set()) <= {keyword.arg for keyword in call.keywords}
    ]


def test_the_modules_that_name_a_device_are_those_listed():
    assert {module for module in ENGINE if _devices((PACKAGE / module).read_text())} == set(ALLOWED)


def test_modules_give_every_new_tensor_a_dtype_and_a_device():
    found = {module: _by_default((PACKAGE / module).read_text()) for module in ENGINE}
    assert {module: calls for module, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "code", ["x.to('cuda')", "torch.cuda.synchronize()", "x.is_cuda", "d.type == 'cpu'", "f('XLA:0')"]
)
def test_a_device_is_found(code):
    assert len(_devices(code)) == 1


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("torch.ones((), device=d)", True),
        ("f(torch.tensor(x))", True),
        ("torch.randperm(3)", True),
        ("torch.ones((), dtype=t, device=d)", False),
        ("torch.ones_like(x)", False),
        ("x.new_zeros(3)", False),
    ],
)
def test_a_tensor_of_a_default_is_found(code, is_found):
    assert bool(_by_default(code)) == is_found
