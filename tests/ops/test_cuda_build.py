"""The compiled CUDA kernels; these tests need nvcc, but no GPU."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from configured import configure

from pyengine.ops import native

ROOT = Path(__file__).resolve().parents[2]
# kernels.cu has no kernels.
SOURCES = [path for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu")) if path.stem != "kernels"]
ARCHS = [80, 90, 100]
# An SM has 65536 registers: with 80 per thread it holds 768 threads, each of which loads at least 64 bytes
# before it uses any. That is 48 KiB in flight; bandwidth × latency of the devices we know is 30 to 45 KiB
# per SM.
MAX_REGISTERS = 80
# The codec's kernels for blocks of 1024 keep 32 values per thread between their two passes, four times as
# many as the kernels for the usual blocks of 256, and use up to 124 registers.
LONG_BLOCKS = re.compile(r"codec_\w*kernel.*ELi1024E")

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@functools.cache
def compile_for_all(source: Path, folder: Path) -> tuple[int, str]:
    """Return nvcc's exit status and the output of nvcc and ptxas; reuse the output that a build has kept."""
    for kept in (ROOT / "build").glob(f"core-*/**/{source.name}.o.ptxas"):
        if kept.stat().st_mtime > max(path.stat().st_mtime for path in source.parent.iterdir()):
            return 0, kept.read_text()
    command = ["nvcc", "-std=c++20", "-O3", "--fmad=false", "-Werror", "all-warnings", "-Xptxas", "-v"]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    command += ["--threads", "2", "-fatbin", str(source), "-o", str(folder / f"{source.stem}.fatbin")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fatbin")


@needs_nvcc
@pytest.mark.slow  # minutes, unless a build with PYENGINE_WERROR=1 has kept the output
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
def test_kernels_compile_without_warnings_spills_or_many_registers(source, arch, folder):
    status, said = compile_for_all(source, folder)
    assert status == 0 and "warning" not in said, said
    kernels = [kernel for kernel in KERNEL.finditer(said) if int(kernel["arch"]) == arch]
    assert len(kernels) == said.count(f"' for 'sm_{arch}'") > 0, said
    in_memory = {k["name"]: k[0] for k in kernels if int(k["stack"]) + int(k["stores"]) + int(k["loads"])}
    assert in_memory == {}
    kernels = [kernel for kernel in kernels if not LONG_BLOCKS.search(kernel["name"])]
    assert {k["name"]: k["registers"] for k in kernels if int(k["registers"]) > MAX_REGISTERS} == {}


@needs_nvcc
@pytest.mark.slow
def test_threads_that_race_to_set_a_flag_do_so_by_relaxed_stores(folder):
    ptx = folder / "accumulate.ptx"
    command = ["nvcc", "-std=c++20", "-O3", "--fmad=false", "-arch=compute_90", "--ptx"]
    subprocess.run([*command, str(ROOT / "csrc/cuda/accumulate.cu"), "-o", str(ptx)], check=True)
    accesses = re.findall(r"\b(?:ld|st)\.\S*[us]8\b", ptx.read_text())
    # PTX ISA, memory consistency model: volatile is relaxed, and relaxed accesses do not race.
    assert set(accesses) == {"ld.volatile.global.u8", "st.volatile.global.u8"}


@pytest.mark.slow
@pytest.mark.parametrize(("version", "is_refused"), [("12.0.140", True), ("12.1.66", False)])
def test_an_nvcc_that_does_not_know_so_many_parameters_is_refused_by_name(version, is_refused, tmp_path):
    said = _configured(tmp_path, PYENGINE_CUDA="ON", CMAKE_CUDA_COMPILER_VERSION=version)
    assert (f"nvcc is {version}; expected 12.1 or newer" in " ".join(said.split())) == is_refused


def _configured(folder: Path, **settings: str) -> str:
    """Return CMake's output for a CUDA compiler that it only believes to exist."""
    forced = {"CMAKE_CUDA_COMPILER": "/bin/true", "CMAKE_CUDA_COMPILER_FORCED": "1"}
    forced |= {"CMAKE_CUDA_COMPILER_ID_RUN": "1", "CMAKE_CUDA_COMPILER_ID": "Fake"}
    done = configure(folder, **(forced | settings))
    return done.stdout + done.stderr


@needs_nvcc
@pytest.mark.skipif(os.environ.get("PYENGINE_CUDA") == "0", reason="PYENGINE_CUDA=0 leaves CUDA out")
def test_the_core_has_cuda_where_there_is_nvcc():
    core = native.core()
    assert core is None or core.has_cuda


@pytest.mark.parametrize(("value", "remedy"), [("1", "PATH"), ("yes", "expected 0")])
def test_a_cuda_setting_that_cannot_be_met_is_a_clear_error(value, remedy, tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "PYENGINE_NO_EXT")}
    environ |= {"PYENGINE_CUDA": value, "PATH": str(tmp_path)}
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, check=False, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"PYENGINE_CUDA={value}" in done.stderr and remedy in done.stderr
