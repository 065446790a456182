"""Checks of Python, torch and the packages around them."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from pyengine.cli.doctor.finding import Finding, fail, ok, warn

_PYTHON, _TORCH = (3, 10), (2, 9)
_COMMAND_LINE = ("rich", "scikit-learn", "numpy")  # packages of pyengine[train]
_BESIDE = ("accelerate", "lightning", "transformers", "tensorboard", "wandb")


def python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _PYTHON:
        return fail("python", text, "install Python 3.10 or newer")
    return ok("python", text)


def torch_itself() -> Finding:
    built = torch.version.cuda and f"CUDA {torch.version.cuda}"
    text = f"{torch.__version__}, built for {built or torch.version.hip or 'CPU'}"
    if torch.__version__ < _TORCH:  # type: ignore[operator]  # TorchVersion takes tuples
        return fail("torch", text, "pip install 'torch>=2.9'")
    return ok("torch", text)


def backends() -> Finding:
    """Check the backends of torch.distributed."""
    if not dist.is_available():
        return fail(
            "backends", "torch is built without distributed", "install torch from pytorch.org or PyPI"
        )
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    text = ", ".join(name for name, available in there.items() if available) or "none"
    if not there["gloo"]:
        return fail("backends", f"{text}; no gloo, which workers on a CPU need", "install torch from PyPI")
    if torch.cuda.is_available() and not there["nccl"]:
        return warn(
            "backends",
            f"{text}; no nccl, so CUDA gradients are reduced through the host",
            "install a build of torch with NCCL (on Linux every CUDA build has it)",
        )
    return ok("backends", text)


def xla() -> Finding:
    """Check that torch_xla is for this torch, without importing it, which takes seconds and patches torch."""
    found = _version("torch_xla")
    if found is None:
        return ok("torch_xla", "not installed; only XLA devices need it")
    needed, installed = _minor(found), _minor(torch.__version__)
    if needed != installed:
        return warn(
            "torch_xla",
            f"{found} is for torch {needed} and cannot be imported with {torch.__version__}",
            f"pip install 'torch_xla=={installed}.*', or 'torch=={needed}.*'",
        )
    return ok("torch_xla", found)


def packages() -> Finding:
    """Check the packages that the command line needs, and report optional ones."""
    found = {name: _version(name) for name in (*_COMMAND_LINE, *_BESIDE)}
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number) or "none"
    missing = [name for name in _COMMAND_LINE if found[name] is None]
    if missing:
        return warn(
            "packages",
            f"{there}; train and other commands also need {', '.join(missing)}",
            "pip install '.[train]' in a clone of pyengine",
        )
    absent = [name for name in _BESIDE if found[name] is None]
    return ok("packages", f"{there}; optional, not installed: {', '.join(absent)}" if absent else there)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(number: str) -> str:
    return ".".join(number.split(".")[:2])
