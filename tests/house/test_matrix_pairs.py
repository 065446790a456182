"""What `make matrix` runs, without running it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "matrix"))

import matrix

PAIRS = matrix.parse(matrix.PAIRS)
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_it_begins_at_the_oldest_python_and_torch_that_the_project_takes():
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', PROJECT)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    assert PAIRS[0].python == python and PAIRS[0].torch.startswith(f"{torch}.")


def test_it_has_every_python_once_and_the_torch_that_we_pin():
    assert [pair.python for pair in PAIRS] == [f"3.{minor}" for minor in range(10, 15)]
    assert f"torch=={PAIRS[1].torch}" in (ROOT / "requirements-run.txt").read_text().splitlines()


def test_what_only_a_gpu_needs_of_torch_is_left_out():
    asked = [
        "filelock",
        "setuptools<82",
        'nvidia-nccl-cu13==2.28.9; platform_system == "Linux"',
        'cuda-toolkit[cublas]==13.0.2; platform_system == "Linux"',
        'triton==3.6.0; platform_system == "Linux"',
        'optree>=0.13.0; extra == "optree"',
    ]
    assert matrix.needed_beside(asked) == ["filelock", "setuptools<82"]


def test_torch_chooses_its_own_setuptools():
    assert not [line for line in matrix.pins() if re.match(r"torch|setuptools|-r", line)]
    assert any(line.startswith("pytest==") for line in matrix.pins())


@pytest.mark.parametrize("pairs", ["3.12", "3.12:", "3.12:2.11.0,", "2.11.0:3.12"])
def test_pairs_that_cannot_be_are_refused_by_name(pairs):
    with pytest.raises(SystemExit, match="need PYTHON:TORCH"):
        matrix.parse(pairs)


def test_a_python_that_is_not_here_is_left_out():
    assert matrix.Pair("3.99", "2.9.0").interpreter() is None


def test_what_it_runs_is_there():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (tests,) = re.findall(r"^MATRIX_TESTS \?= (.*)$", makefile, re.MULTILINE)
    assert [test for test in tests.split() if not (ROOT / test).is_file()] == []
