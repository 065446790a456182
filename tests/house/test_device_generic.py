"""The ordinary path serves any device that torch.distributed serves:
no module but those named here knows one by name.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pyengine"
DEVICES = {"cpu", "cuda", "xla", "tpu", "mps", "xpu", "hpu", "npu"}
# Which modules may, and why.
ALLOWED = {
    "ops/cuda.py": "binds the CUDA kernels",
    "ops/native.py": "tells the core which dispatch keys the tensors have that it can address",
    "ops/pointers.py": "tells memory that the native core can address from other memory",
    "ops/plan.py": "chooses between the native core's kernels and reference.py",
    "ops/exact.py": "the same",
    "ops/codec.py": "the same",
    "ops/exact_reference.py": "the same",
    "ops/device.py": "the one place that tells what a kind of device can do",
    "data/rng.py": "seeds every generator that there is, XLA's too",
    "checkpoint/checkpoints.py": "ranks tell each other what files hold, which the host has read",
    "checkpoint/loading.py": "a file is read into the host's memory",
    "ops/trace.py": "NVTX is CUDA's own",
    "comm/registered_memory.py": "NCCL's memory pools are torch.cuda's",
    "comm/xla.py": "torch_xla's transport: what its CPU backend cannot reduce",
}
MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if "cli" not in path.parts and str(path.relative_to(PACKAGE)) not in ALLOWED
)


def _names(source: str) -> list[str]:
    """Return the device names in a module's code: strings outside docstrings, `torch.cuda`, `is_cuda`."""
    tree, found = ast.parse(source), []
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found += [node.value] * (node.value.lower().partition(":")[0] in DEVICES)
        elif isinstance(node, ast.Attribute):
            is_module = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in DEVICES
            found += [node.attr] * (is_module or node.attr.removeprefix("is_") in DEVICES - {node.attr})
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_knows_no_device_by_name(module):
    assert _names((PACKAGE / module).read_text()) == []


@pytest.mark.parametrize("module", ALLOWED)
def test_the_exceptions_exist_and_are_needed(module):
    assert (PACKAGE / module).exists()


@pytest.mark.parametrize(
    "code", ["x.to('cuda')", "torch.cuda.synchronize()", "x.is_cuda", "d.type == 'cpu'", "f('XLA:0')"]
)
def test_a_device_that_is_named_is_found(code):
    assert len(_names(code)) == 1
