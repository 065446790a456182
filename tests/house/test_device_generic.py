"""The engine runs on any device of torch.distributed, with any default dtype and device of torch.

Only the modules listed here name a device, and every new tensor gets a dtype and a device.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from pages import MODULES, PACKAGE

DEVICES = "cpu|cuda|xla|tpu|mps|xpu|hpu|npu"
# The modules that may name a device, and why.
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
    "adapters/dcp.py": "an entry is read into the host's memory",
    "comm/shared_memory.py": "NCCL's memory pools are torch.cuda's",
    "comm/xla.py": "torch_xla's transport: what its CPU backend cannot reduce",
}
# For each function, the arguments that it takes from torch's defaults unless they are given.
BOTH = {"dtype", "device"}
FACTORIES = {
    **dict.fromkeys(["arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"], BOTH),
    **dict.fromkeys(["linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"], BOTH),
    "randint": {"device"},
    "randperm": {"device"},
    "sparse_coo_tensor": {"device"},
}


def _nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield (module, node) for every syntax node of all modules except those of the command line."""
    for module in MODULES:
        if module.parts[0] != "cli":
            for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
                yield str(module), node


def _names_a_device(node: ast.AST) -> bool:
    """Return whether a node names a device, for example as "cuda:0", `torch.cuda` or `.is_cuda`."""
    if isinstance(node, ast.Constant):
        return re.fullmatch(rf"({DEVICES})(:.*)?", str(node.value), re.IGNORECASE) is not None
    if isinstance(node, ast.Attribute):
        return re.search(rf"^torch\.({DEVICES})$|\.is_({DEVICES})$", ast.unparse(node)) is not None
    return False


def test_the_modules_that_name_a_device_are_those_listed():
    assert {module for module, node in _nodes() if _names_a_device(node)} == set(ALLOWED)


def test_modules_give_every_new_tensor_a_dtype_and_a_device():
    made = [
        (module, node, FACTORIES[node.func.attr])
        for module, node in _nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and ast.unparse(node.func.value) == "torch"
    ]
    by_default = [
        (module, ast.unparse(call))
        for module, call, needed in made
        if not needed <= {keyword.arg for keyword in call.keywords}
    ]
    assert made and by_default == []
