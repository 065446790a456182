"""Builds pyengine._core with CMake and Ninja. Needs neither torch nor a GPU.

PYENGINE_NO_EXT=1 builds without it: same results from plain PyTorch, slower.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeExtension(build_ext):
    """Configure and build in one folder a Python version, so that an editable rebuild compiles only changes."""

    def build_extension(self, ext):
        import pybind11

        build = ROOT / "build" / f"core-{sysconfig.get_config_var('SOABI')}"
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            # Under build isolation every build has another Ninja, pybind11 and cmake.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            f"-DPython3_EXECUTABLE={sys.executable}",
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "_core"], check=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        (library,) = build.glob("_core*.so")
        # Replace, never overwrite: a process that has the old file mapped would crash.
        shutil.copy2(library, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)


def extensions():
    return [] if os.environ.get("PYENGINE_NO_EXT") == "1" else [Extension("pyengine._core", sources=[])]


setup(ext_modules=extensions(), cmdclass={"build_ext": CMakeExtension})
