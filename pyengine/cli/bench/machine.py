"""The machine: its card for result files, and the state that numbers are taken in."""

from __future__ import annotations

import ctypes
import platform

import torch

from pyengine.cli import cpu
from pyengine.ops import native

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def card(threads: int) -> dict[str, str | int]:
    """Describe the machine without naming it."""
    core = native.core()
    return {
        "cpu": cpu.name(),
        "isa": core.isa() if core else "reference",
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "malloc": "trimming off" if hasattr(ctypes.CDLL(None), "mallopt") else "as it is",
    }


def hold_memory() -> None:
    """Let malloc, where it is glibc's, keep what it has got from the system, until the process ends.

    With its default settings torch's temporaries are fresh pages every call, and some torch expressions look
    ten times slower.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
