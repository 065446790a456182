"""This machine: its description in results, and its memory settings during measurements."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

from pyengine.ops import native

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


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
        "malloc": "trimming off" if hasattr(ctypes.CDLL(None), "mallopt") else "as it is",
    }
    if device == "cuda":
        kernels = "native" if core and core.has_cuda else "reference"
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "kernels": kernels}
    return found


def hold_memory() -> None:
    """Make glibc's malloc keep freed memory until the process ends.

    By default, malloc returns torch's temporaries to the system, so that every call writes to fresh pages.
    Fresh pages make some torch expressions ten times slower.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
