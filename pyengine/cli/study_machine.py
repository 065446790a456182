"""The machine that a study runs on: what has to be the same for its numbers to be compared."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

import pyengine


def card() -> dict[str, str | int]:
    """Return processor, cores that this process may use, memory and versions."""
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "physical_cores": psutil.cpu_count(logical=False) or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyengine": pyengine.__version__,
    }


def cores() -> int:
    """Return the logical processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
