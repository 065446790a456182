"""Configure the core with CMake, without compiling it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def configure(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Configure into a folder with CMake's settings; skip the test where a tool is missing."""
    pybind11 = pytest.importorskip("pybind11")
    command = [_tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    own = {
        "CMAKE_MAKE_PROGRAM": _tool("ninja"),
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "PYTHON_EXECUTABLE": sys.executable,
        "Python3_EXECUTABLE": sys.executable,
    }
    command += [f"-D{name}={value}" for name, value in (own | settings).items()]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def _tool(name: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=path) or pytest.skip(f"{name} is neither beside Python nor on PATH")
