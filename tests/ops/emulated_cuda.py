"""Build CUDA sources for the CPU against the headers of cuda_emulator/, and run plans on them."""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pyengine.ops.pointers import DTYPE_CODES

EMULATOR = Path(__file__).parent / "cuda_emulator"
CSRC = Path(__file__).resolve().parents[2] / "csrc"
# -O1: half the compile time of -O2, and the tests run hardly longer. contract=off as in CMakeLists.txt.
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w", f"-I{EMULATOR}"]

# The order of blocks, and of the threads of a block between two barriers.
FORWARD, REVERSED, SHUFFLED = ORDERS = range(3)


def build(library: Path, sources: list[Path], flags: tuple[str, ...] = ()) -> Path:
    """Compile and link a shared library; skip the test if that is impossible."""
    compiler = shutil.which("c++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the CUDA emulator needs Linux and a C++ compiler (c++)")

    def compile_one(source: Path) -> Path:
        target = library.with_name(f"{source.name}.o")
        _run([compiler, *FLAGS, *flags, "-x", "c++", "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*sources, EMULATOR / "emulator.cpp"]))
    _run([compiler, "-shared", *map(str, objects), "-o", str(library), "-ldl", "-lpthread"])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def load_kernels(folder: Path):
    """Build csrc/python.cpp with the CUDA kernels into a folder, once, and import it under another name."""
    pybind11 = pytest.importorskip("pybind11")
    core = [CSRC / f"{name}.cpp" for name in ("python", "python_audit", "plan", "overlap", "torch_shim")]
    sources = [*core, EMULATOR / "no_cpu_ops.cpp"]
    flags = ("-DPYENGINE_CUDA", "-DPYENGINE_MODULE=emulated_kernels",
             f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}")  # fmt: skip
    library = folder / "emulated_kernels.so"
    if not library.exists():
        build(library, sources + sorted((CSRC / "cuda").glob("*.cu")), flags)
    spec = importlib.util.spec_from_file_location("emulated_kernels", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    emulator = ctypes.CDLL(str(library))
    module.set_order, module.unload = emulator.emulator_set_order, emulator.emulator_unload
    module.load_kernels()
    return module


class EmulatedPlan:
    """`BucketPlan` for CPU tensors that runs the CUDA kernels; arguments are not checked."""

    def __init__(self, kernels, offsets, numels):
        self.kernels, self.offsets, self.numels = kernels, tuple(offsets), tuple(numels)
        host = kernels.BucketPlan(self.offsets, self.numels)
        self._words = torch.empty(host.num_words, dtype=torch.int64)
        host.write_words(self._words.data_ptr())
        self._plan = kernels.CudaPlan(host, self._words.data_ptr())
        self._scratch = torch.zeros(self._plan.scratch_bytes, dtype=torch.uint8)
        self.most_inline = kernels.MOST_INLINE_SLOTS

    def pack_(self, flat, tensors, scale, *, only_if=None):
        flag = 0 if only_if is None else only_if.data_ptr()
        with self._table(tensors) as table:
            self._plan.pack_(0, flat.data_ptr(), DTYPE_CODES[flat.dtype], table, scale.data_ptr(), flag)

    def unpack_(self, tensors, flat, scale, *, only_if=None):
        flag = 0 if only_if is None else only_if.data_ptr()
        with self._table(tensors) as table:
            self._plan.unpack_(0, flat.data_ptr(), DTYPE_CODES[flat.dtype], table, scale.data_ptr(), flag)

    def accumulate_(self, acc, grads, scale, *, first, nonfinite):
        with self._table(grads) as table:
            self._plan.accumulate_(0, acc.data_ptr(), table, scale.data_ptr(), first, nonfinite.data_ptr())

    def accumulate_cast_(self, wire, acc, grads, grad_scale, wire_scale, *, first, nonfinite):
        with self._table(grads) as table:
            self._plan.accumulate_cast_(
                0, wire.data_ptr(), DTYPE_CODES[wire.dtype], acc.data_ptr(), table,
                grad_scale.data_ptr(), wire_scale.data_ptr(), first, nonfinite.data_ptr(),
            )  # fmt: skip

    def unscale_norm(self, tensors, out, scale, *, sumsq, nonfinite):
        in_place = out is None or out is tensors
        most = self.kernels.MOST_INLINE_SLOTS if in_place else self.kernels.INLINE_SLOTS
        with self._table(tensors, most) as table, self._table(out, most) as out_table:
            self._plan.unscale_norm(
                0, self._scratch.data_ptr(), table, table if out is tensors else out_table,
                scale.data_ptr(), sumsq.data_ptr(), nonfinite.data_ptr(),
            )  # fmt: skip

    @contextlib.contextmanager
    def _table(self, tensors, most=None):
        """Yield the addresses of a list, in "device" memory if there are more than `most`, or more than fit
        in a kernel's parameters.
        """
        if tensors is None:
            yield None
            return
        present = [t for t in tensors if t is not None]
        dtype = DTYPE_CODES[present[0].dtype] if present else 0
        table = self.kernels.Table([0 if t is None else t.data_ptr() for t in tensors], dtype)
        on_device = torch.full((len(self.numels),), -1, dtype=torch.int64)
        long = len(self.numels) > min(self.most_inline, most or self.most_inline)
        yield self.kernels.uploaded(table, on_device.data_ptr(), 0) if long else table
