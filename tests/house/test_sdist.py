"""The sdist holds what a build and its tests need, and nothing that was built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = [
    "pyengine",
    "csrc",
    "tests",
    "docs",
    "examples",
    "setup.py",
    "pyproject.toml",
    "CMakeLists.txt",
    "Makefile",
]


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so nothing to compare with")
def test_the_sdist_holds_every_tracked_file_that_a_build_or_a_test_needs(tmp_path):
    _run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path))
    packed = set((tmp_path / "pyengine_torch.egg-info" / "SOURCES.txt").read_text().splitlines())
    tracked = {path for path in _run("git", "ls-files", *NEEDED).splitlines() if (ROOT / path).exists()}
    assert tracked - packed == set()
    assert {path for path in packed if path.endswith((".so", ".pyc"))} == set()
