"""Builds pyengine.ops._core with CMake and Ninja. Needs neither torch nor a GPU.

PYENGINE_NO_EXT=1 builds without it: same results from plain PyTorch, slower.
PYENGINE_CUDA=0 leaves the CUDA kernels out, =1 insists on them; unset builds them where nvcc is found.
PYENGINE_CUDA_ARCHS="90-real;100" compiles them for other devices than sm_80, sm_90, sm_100 and newer.
PYENGINE_NATIVE=1 compiles for the best instruction set of this machine alone, in half the time.
PYENGINE_WERROR=1 lets a compiler's warnings fail the build; CI does.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
WITHOUT = "install without the core (same results, slower): PYENGINE_NO_EXT=1 pip install ."


class CMakeExtension(build_ext):
    """Configure and build in one folder a Python version, so that an editable rebuild compiles only
    changes.
    """

    def build_extension(self, ext):
        import pybind11

        build = ROOT / "build" / f"core-{sysconfig.get_config_var('SOABI')}"
        configure = [
            tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            # Under build isolation every build has another Ninja, pybind11 and cmake.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            # All settings every time: the folder remembers those of the last build.
            f"-DPYENGINE_CUDA={'ON' if with_cuda() else 'OFF'}",
            setting("PYENGINE_CUDA_ARCHS"),
            switch("PYENGINE_NATIVE"),
            switch("PYENGINE_WERROR"),
        ]  # fmt: skip
        run(configure)
        run([tool("cmake"), "--build", str(build), "--target", "_core"])
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        (library,) = build.glob("_core*.so")
        # Replace, never overwrite: a process that has the old file mapped would crash.
        shutil.copy2(library, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)


def run(command):
    """Run a command; if it fails, end with what to type instead of a traceback."""
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"pyengine's core was not built, for the reason above. Solve it, or {WITHOUT}")


def check_compiler():
    """Exit with one sentence if CMake would find no C++ compiler."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(map(shutil.which, chosen or ["c++", "g++", "clang++", "icpx", "cl"])):
        missing = f"CXX={chosen[0]} is not there" if chosen else "neither c++, g++ nor clang++ is on PATH"
        sys.exit(f"pyengine's core needs a C++20 compiler, and {missing}: install g++, or {WITHOUT}")


def tool(name):
    """Find a build tool: this environment's own before another that PATH may hold."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    return found or sys.exit(f"{name} is missing: pip install {name}")


def setting(name):
    """Hand one of CMake's settings on from the environment, or go back to its default."""
    value = os.environ.get(name)
    return f"-D{name}={value}" if value else f"-U{name}"


def switch(name):
    """Turn one of CMake's options on where the environment has it as 1."""
    return f"-D{name}={'ON' if os.environ.get(name) == '1' else 'OFF'}"


def with_cuda():
    """Whether to build the CUDA kernels; CMake looks for nvcc in the same places."""
    wanted, nvcc = os.environ.get("PYENGINE_CUDA", ""), os.environ.get("CUDACXX") or shutil.which("nvcc")
    if wanted not in ("", "0", "1"):
        sys.exit(
            f"PYENGINE_CUDA={wanted}; needed 0 (without CUDA), 1 (with CUDA) or unset: where nvcc is found"
        )
    if wanted == "1" and not nvcc:
        sys.exit(
            "PYENGINE_CUDA=1, but there is no nvcc: put the CUDA toolkit's bin folder on PATH or set "
            "CUDACXX, or unset PYENGINE_CUDA to build without CUDA"
        )
    return wanted != "0" and bool(nvcc)


def extensions():
    if os.environ.get("PYENGINE_NO_EXT") == "1":
        return []
    # So that what cannot be met fails before anything is built.
    with_cuda()
    check_compiler()
    return [Extension("pyengine.ops._core", sources=[])]


setup(ext_modules=extensions(), cmdclass={"build_ext": CMakeExtension})
