"""The description of this machine in result files."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from pyengine.ops import native


def cpu_name() -> str:
    """Return the processor's model if the system reports it, otherwise its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def card(threads: int, device: str = "cpu") -> dict[str, str | int]:
    """Describe the machine without its host name."""
    core = native.core()
    found: dict[str, str | int] = {
        "cpu": cpu_name(),
        "isa": core.isa() if core else "reference",
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    if device == "cuda":
        kernels = "native" if core and core.has_cuda else "reference"
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "kernels": kernels}
    return found
