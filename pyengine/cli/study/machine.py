"""The machine that a study runs on: what has to be the same for its numbers to be compared."""

from __future__ import annotations

import platform

import psutil
import torch

import pyengine
from pyengine.cli import cpu


def card() -> dict[str, str | int]:
    """Return processor, cores that this process may use, memory and versions."""
    return {
        "cpu": cpu.name(),
        "cores": cpu.cores(),
        "physical_cores": psutil.cpu_count(logical=False) or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyengine": pyengine.__version__,
    }
