"""PYENGINE_ISA forces the instruction set of the tests, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forced_isa
import pytest

from pyengine.ops import native

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(native._core is None, reason="there is no native core")
# Uses the core as tests do: in the test's process, on a rank, and in a process that a child process starts.
INSIDE = """
import subprocess, sys
from pyengine.ops import native

def named():
    return native.core().isa()

def test_it(ranks):
    code = "from pyengine.ops import native; print(native.core().isa())"
    nesting = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    nested = [sys.executable, "-c", nesting]
    third = subprocess.run(nested, check=True, capture_output=True, text=True).stdout.strip()
    assert [named(), *ranks(1).run(named), third] == ["generic"] * 3
"""


@pytest.mark.slow
def test_the_switch_holds_here_on_ranks_and_in_started_processes(tmp_path):
    (tmp_path / "test_inside.py").write_text(INSIDE)
    conftest = (TESTS / "conftest.py").read_text().replace("Path(__file__).parent", f"Path({str(TESTS)!r})")
    (tmp_path / "conftest.py").write_text(conftest)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        check=False, capture_output=True, text=True, cwd=TESTS.parent,
        env={**os.environ, "PYENGINE_ISA": "generic"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_level_is_an_error_that_names_those_that_are_there(monkeypatch):
    monkeypatch.setenv("PYENGINE_ISA", "auto")
    core = native.core()
    before, found = core.isa(), ", ".join(forced_isa.available(core))
    assert f"PYENGINE_ISA=auto: needed one of {found}, which" in forced_isa.everywhere()
    assert core.isa() == before
