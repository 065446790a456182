"""PYENGINE_NATIVE=1 compiles the ops for one instruction set, the best of the build machine."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from configured import configure

AVX2 = ("AVX2", "FMA", "F16C")
AVX512 = (*AVX2, "AVX512F", "AVX512BW", "AVX512DQ", "AVX512VL")
# Reports the given extensions for its machine, and otherwise runs the real compiler.
COMPILER = """#!/bin/sh
case "$*" in *-march=native*) for name in {names}; do echo "#define __${{name}}__ 1"; done;;
*) exec {compiler} "$@";; esac
"""


@pytest.fixture
def levels(tmp_path):
    """Return a function: the instruction sets that CMake builds on a machine with given extensions."""
    compiler = shutil.which("c++") or pytest.skip("c++ is not on PATH")

    def levels(names: tuple[str, ...], native: str) -> set[str]:
        path, build = tmp_path / "c++", tmp_path / "build"
        path.write_text(COMPILER.format(names=" ".join(names) or "''", compiler=compiler))
        path.chmod(0o755)
        configure(
            build, CMAKE_CXX_COMPILER=str(path), CMAKE_SYSTEM_PROCESSOR="x86_64", PYENGINE_NATIVE=native
        ).check_returncode()
        plan = (build / "build.ninja").read_text()
        compiled = set(re.findall(r"-DPYENGINE_ISA=(\w+)", plan))
        assert set(re.findall(r"-DPYENGINE_NATIVE=(\w+)", plan)) == (compiled if native == "ON" else set())
        return compiled

    return levels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "native", "compiled"),
    [
        ((), "ON", {"generic"}),
        (AVX2, "ON", {"avx2"}),
        (AVX512, "ON", {"avx512"}),
        (AVX512[:-1], "ON", {"avx2"}),
        (AVX512[1:], "ON", {"generic"}),
        (AVX2, "OFF", {"generic", "avx2", "avx512"}),
    ],
    ids=["neither", "AVX2", "AVX-512", "AVX-512 without VL", "no AVX2", "any other build"],
)
def test_a_build_has_its_machines_best_instruction_set_alone_or_all_of_them(names, native, compiled, levels):
    assert levels(names, native) == compiled


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have one level")
@pytest.mark.parametrize(
    ("level", "is_supported", "is_usable"),
    [("avx512", 0, False), ("avx512", 1, True), ("avx2", 0, False), ("avx2", 1, True), ("generic", 0, True)],
)
def test_a_build_for_another_machine_has_nothing_here(level, is_supported, is_usable, tmp_path):
    """The module then refuses to be imported, and plain PyTorch is used."""
    compiler = shutil.which("c++") or pytest.skip("c++ is not on PATH")
    dispatch = Path(__file__).resolve().parents[2] / "csrc" / "cpu" / "dispatch.cpp"
    (tmp_path / "main.cpp").write_text(
        f'#include "{dispatch.with_suffix(".h")}"\nint main() {{ return pyengine::has_ops(); }}'
    )
    command = [compiler, "-std=c++20", "-DPYENGINE_X86", f"-DPYENGINE_NATIVE={level}"]
    command += [f"-D__builtin_cpu_supports(name)={is_supported}", str(dispatch), str(tmp_path / "main.cpp")]
    # The ops are neither linked nor called.
    subprocess.run(
        [*command, "-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-o", str(tmp_path / "main")], check=True
    )
    assert subprocess.run([str(tmp_path / "main")], check=False).returncode == is_usable
