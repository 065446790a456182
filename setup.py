"""Build pyengine.ops._core with CMake and Ninja; neither torch nor a GPU is needed.

PYENGINE_NO_EXT=1 installs without the core: plain PyTorch computes the same results more slowly.
PYENGINE_CUDA=0 excludes the CUDA kernels, and 1 requires them; by default they are built if nvcc is found.
PYENGINE_CUDA_ARCHS="90-real;100" replaces the default devices: sm_80, sm_90, sm_100 and newer.
PYENGINE_NATIVE=1 compiles only for the best instruction set of this machine, in half the time.
PYENGINE_WERROR=1 turns compiler warnings into errors, as in CI.
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
    """Configure and build in one folder per Python version, so that a rebuild compiles only changed files."""

    def build_extension(self, ext):
        import pybind11

        build = ROOT / "build" / f"core-{sysconfig.get_config_var('SOABI')}"
        configure = [
            tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            # With build isolation, every build has its own copies of Ninja, pybind11 and CMake.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            # Always pass all settings, because the folder keeps those of the last build.
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
        # Replace the file instead of overwriting it, which would crash processes that have mapped it.
        shutil.copy2(library, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)


def run(command):
    """Run a command; if it fails, exit with advice instead of a traceback."""
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"pyengine's core was not built, for the reason above. Fix it, or {WITHOUT}")


def check_compiler():
    """Exit with a short message if CMake would not find a C++ compiler."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(map(shutil.which, chosen or ["c++", "g++", "clang++", "icpx", "cl"])):
        missing = f"CXX={chosen[0]} was not found" if chosen else "neither c++, g++ nor clang++ is on PATH"
        sys.exit(f"pyengine's core needs a C++20 compiler, and {missing}: install g++, or {WITHOUT}")


def tool(name):
    """Find a build tool, in this environment first and then on PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    return found or sys.exit(f"{name} is missing: pip install {name}")


def setting(name):
    """Return the CMake option that sets a variable from the environment, or resets it to its default."""
    value = os.environ.get(name)
    return f"-D{name}={value}" if value else f"-U{name}"


def switch(name):
    """Return the CMake option that turns a switch on if the environment variable is 1, and off otherwise."""
    return f"-D{name}={'ON' if os.environ.get(name) == '1' else 'OFF'}"


def with_cuda():
    """Whether to build the CUDA kernels; CMake searches for nvcc in the same places."""
    wanted, nvcc = os.environ.get("PYENGINE_CUDA", ""), os.environ.get("CUDACXX") or shutil.which("nvcc")
    if wanted not in ("", "0", "1"):
        sys.exit(
            f"PYENGINE_CUDA={wanted}: expected 0 (without CUDA), 1 (with CUDA), or unset (with CUDA if nvcc "
            "is found)"
        )
    if wanted == "1" and not nvcc:
        sys.exit(
            "PYENGINE_CUDA=1, but nvcc was not found: put the CUDA toolkit's bin folder on PATH or set "
            "CUDACXX, or unset PYENGINE_CUDA to build without CUDA"
        )
    return wanted != "0" and bool(nvcc)


def extensions():
    if os.environ.get("PYENGINE_NO_EXT") == "1":
        return []
    # Check the requirements before anything is built.
    with_cuda()
    check_compiler()
    return [Extension("pyengine.ops._core", sources=[])]


setup(ext_modules=extensions(), cmdclass={"build_ext": CMakeExtension})
