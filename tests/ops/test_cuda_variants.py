"""The ways to reach memory (csrc/cuda/variant.h) are compiled one at a time, and give the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [Path(__file__).parent / name for name in ("test_cuda.py", "test_exact_cuda.py")]


def test_a_build_says_which_variant_it_is(kernels):
    assert kernels.CUDA_VARIANT == os.environ.get("PYENGINE_EMULATED_VARIANT", "narrow")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["wide", "staged"])
def test_the_other_variants_pass_the_tests_of_the_first(variant):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not gpu and not slow"]
    environ = os.environ | {"PYENGINE_EMULATED_VARIANT": variant}
    done = subprocess.run(
        [*command, *map(str, TESTS)], check=False, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
