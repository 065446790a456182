"""`python -m pyengine doctor`, as a user runs it: on a working installation, and on a broken one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

import pyengine
from pyengine.cli.doctor import run as doctor
from pyengine.cli.doctor.checks import CheckResult, fail, ok, warn
from pyengine.cli.main import main

HERE = Path(pyengine.__file__).parents[1]


def examine(folder: Path, *, before: str = "pass") -> tuple[int, dict[str, Any]]:
    """Run the command on the package in a folder; return the exit code, and findings and verdict by name."""
    code = f"import sys; {before}; from pyengine.cli.main import main; sys.exit(main(['doctor', '--json']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    return done.returncode, {line.get("name", line["event"]): line for line in lines}


@pytest.mark.slow
def test_a_whole_installation_is_healthy():
    code, found = examine(HERE)
    assert (code, found["verdict"]["healthy"], found["verdict"]["broken"]) == (0, True, [])
    assert set(doctor.CHECKS) - {"cuda"} <= set(found)  # each CUDA device has its own name
    assert found["workers"]["status"] == "ok"


@pytest.fixture
def broken(tmp_path):
    """Return a folder with a copy of the package whose native core is not a library."""
    copy = tmp_path / "pyengine"
    shutil.copytree(HERE / "pyengine", copy, ignore=shutil.ignore_patterns("_core*.so", "__pycache__"))
    (copy / "ops" / f"_core{EXTENSION_SUFFIXES[0]}").write_text("not a library")
    return tmp_path


@pytest.mark.slow
def test_a_broken_one_without_rich_says_so_and_still_runs_its_workers(broken):
    code, found = examine(broken, before="sys.modules['rich'] = None")
    assert (code, found["verdict"]["broken"]) == (1, ["core"])
    assert "does not load" in found["core"]["text"]
    assert found["workers"]["status"] == "ok"


def raises() -> CheckResult:
    raise KeyError("sm_999")


GOOD, SLOW, BAD = ok("good", "runs"), warn("slow", "limps", "a stick"), fail("bad", "lies down", "a bed")


@pytest.mark.parametrize(
    ("checks", "code", "last"),
    [
        ({"a": lambda: GOOD}, 0, "Healthy: pyengine works here."),
        ({"a": lambda: [GOOD, SLOW]}, 0, "Healthy: pyengine works here. Could be better: slow."),
        ({"a": lambda: [BAD, SLOW], "b": lambda: GOOD}, 1, "Broken: bad. Could be better: slow."),
        ({"a": raises, "b": lambda: GOOD}, 1, "Broken: a."),
    ],
)
def test_exit_code_and_verdict(monkeypatch, capsys, checks, code, last):
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_check_that_raises_is_a_finding_and_the_others_go_on():
    first, second = doctor.examine({"a": raises, "b": lambda: GOOD})
    assert first.status == "fail" and "KeyError: 'sm_999'" in first.text
    assert second == GOOD


def test_lines_are_wrapped_and_remedies_stand_under_them(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(
        doctor, "CHECKS", {"a": lambda: warn("slow", "limps " * 20 + "\n\nand falls", "a stick")}
    )
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("WARN  slow           limps limps")
    assert "                   → a stick" in lines
    assert "                     and falls" in lines
    assert max(map(len, lines)) <= 60
