"""Checks of native code: the compiler, the native core, its kernels on the CPU and on CUDA devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from pyengine.cli.doctor.finding import Finding, fail, ok, warn
from pyengine.ops import native
from pyengine.ops.plan import BucketPlan

FOLDER = Path(native.__file__).parent
NVIDIA = Path("/dev/nvidiactl")  # exists if the driver is loaded
_COMPILERS = ("c++", "g++", "clang++")  # in CMake's order
# No kernel for the device, a wrong result, a core of another version than the Python sources.
_WRONG = (RuntimeError, ArithmeticError, AttributeError, TypeError)
_CXX20 = "#include <span>\n#include <concepts>\nint main() { return std::span<int>{}.size(); }\n"


def compiler() -> Finding:
    """Check for a C++20 compiler, which only builds need."""
    name = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if name is None or shutil.which(name) is None:
        missing = f"CXX={name} does not exist" if name else f"none of {', '.join(_COMPILERS)} on PATH"
        return warn(
            "compiler",
            f"{missing}: neither the native core nor torch.compile on a CPU can be built",
            "apt install g++ (Debian, Ubuntu), xcode-select --install (macOS), or set CXX",
        )
    command = [name, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, check=False, input=_CXX20, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return warn(
            "compiler",
            f"{name} does not support C++20 ({(done.stderr.splitlines() or ['no message'])[0]})",
            "set CXX to GCC 10, Clang 13 or newer before building",
        )
    return ok("compiler", f"{shutil.which(name)} supports C++20")


def core() -> Finding:
    """Check that the native core loads and computes correctly, and report its instruction set."""
    if native._core is None:
        return _without_core(str(native._missing))
    try:
        _compute(torch.device("cpu"))
    except _WRONG as error:
        return fail("core", f"loads, then fails: {error}", _REBUILD)
    pool = native._core.thread_pool()
    cuda = "with" if native._core.has_cuda else "without"
    text = f"loads; {native._core.isa()} instructions, {cuda} CUDA kernels, threads of {pool}"
    if pool != "torch" and torch.__version__ >= (2, 10):  # type: ignore[operator]  # takes tuples
        return warn("core", f"{text}: torch's thread pool was not found", _REBUILD)
    return ok("core", text)


def cuda() -> list[Finding]:
    """Check the CUDA devices by running a kernel on each."""
    if not torch.cuda.is_available():
        return [_without_cuda()]
    return [_device(index) for index in range(torch.cuda.device_count())]


_REBUILD = "rebuild it in a clone of pyengine: pip install --force-reinstall --no-deps ."


def _without_core(error: str) -> Finding:
    files = sorted(path.name for path in FOLDER.glob("_core*") if path.suffix in (".so", ".pyd"))
    mine = [name for name in files if name.removeprefix("_core") in EXTENSION_SUFFIXES]
    if mine:
        return fail("core", f"{mine[0]} does not load: {error}", _REBUILD)
    others = f"; {', '.join(files)} is for another Python" if files else ""
    return warn(
        "core",
        f"not built{others}: plain PyTorch computes the same results, slower",
        "pip install . in a clone of pyengine, with a C++20 compiler and PYENGINE_NO_EXT unset",
    )


def _without_cuda() -> Finding:
    driver = NVIDIA.exists()
    if torch.version.cuda is None and driver:
        return warn(
            "cuda",
            f"there is an NVIDIA driver, and torch {torch.__version__} is built without CUDA",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )
    if driver:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        return fail(
            "cuda",
            f"there is an NVIDIA driver, and torch sees no device{hidden}",
            f"unset CUDA_VISIBLE_DEVICES, or update the driver to one for CUDA {torch.version.cuda} "
            "(see nvidia-smi)",
        )
    return ok("cuda", "no CUDA device here")


def _device(index: int) -> Finding:
    name = f"cuda:{index}"
    about = torch.cuda.get_device_properties(index)
    arch = f"{about.major}{about.minor}"
    text = f"{about.name}, sm_{arch}, {about.total_memory / 2**30:.0f} GiB"
    try:
        _compute(torch.device("cuda", index))
    except _WRONG as error:
        return fail(
            name,
            f"{text}: {error}",
            f"torch is built for {' '.join(torch.cuda.get_arch_list())}, which must include sm_{arch}; build "
            f"the core for it: PYENGINE_CUDA=1 PYENGINE_CUDA_ARCHS={arch} pip install --force-reinstall "
            "--no-deps .",
        )
    if native._core is None or not native._core.has_cuda:
        nvcc = shutil.which("nvcc") or "nvcc 12.8 or newer, which is not on PATH"
        return warn(
            name,
            f"{text}: works, without CUDA kernels, slower",
            f"PYENGINE_CUDA=1 pip install --force-reinstall --no-deps . (with {nvcc})",
        )
    return ok(name, f"{text}: kernels run")


def _compute(device: torch.device) -> None:
    """Run an op with a known result; raise ArithmeticError if it differs."""
    sizes = [3, 1000]
    plan = BucketPlan([0, 32], sizes)
    tensors = [torch.full((size,), float(size), device=device) for size in sizes]
    sumsq = torch.zeros(2, dtype=torch.float64, device=device)
    flags = torch.zeros(2, dtype=torch.uint8, device=device)
    plan.unscale_norm(tensors, tensors, torch.tensor(0.5, device=device), sumsq=sumsq, nonfinite=flags)
    got = [sumsq.tolist(), [tensor.unique().tolist() for tensor in tensors], flags.tolist()]
    want = [[size * (size / 2) ** 2 for size in sizes], [[size / 2] for size in sizes], [0, 0]]
    if got != want:
        raise ArithmeticError(f"unscale_norm returned {got}, expected {want}")
