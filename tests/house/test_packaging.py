"""What each extra and target installs, the name of the package, and what the sdist contains."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest
from pages import ROOT

import pyengine

PROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")
IN_SDIST = ["pyengine", "csrc", "tests", "docs", "examples", "setup.py", "pyproject.toml", "CMakeLists.txt"]


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _listed(key: str) -> set[str]:
    """Return the packages of a list in pyproject.toml, without their versions."""
    (found,) = re.findall(rf"^{key} = \[(.*)\]$", PROJECT, re.MULTILINE)
    return set(re.findall(r'"([\w-]+)', found.lower()))


def _setting(name: str) -> list[str]:
    (found,) = re.findall(rf"^{name} [:?]= (.*)$", MAKEFILE, re.MULTILINE)
    return found.split()


def test_make_run_installs_what_train_and_the_build_need_and_nothing_else():
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "requirements-run.txt").read_text().lower(), re.MULTILINE)
    assert set(pinned) == {"torch"} | _listed("requires") | _listed("train")
    assert set(_setting("BUILD_TOOLS")) == _listed("requires")


def test_the_choices_of_tests_in_the_makefile_exist():
    names = ("WHEEL_TESTS", "MATRIX_TESTS", "MATRIX_SMALL", "ISA_TESTS")
    chosen = [test for name in names for test in _setting(name)]
    assert [test for test in chosen if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize(
    ("settings", "without_cuda"),
    [(["DEVICE="], True), (["DEVICE=/dev/nvidiactl"], False), (["DEVICE=", "PYENGINE_CUDA=1"], False)],
    ids=["no device", "device", "asked for"],
)
def test_make_run_leaves_cuda_out_only_where_there_is_no_device_and_nobody_asked(settings, without_cuda):
    options = ["--dry-run", "--always-make", "--no-print-directory", "VENV=new", "CUDACXX="]
    planned = _run("make", *options, "run", *settings)  # in a new checkout
    assert ("PYENGINE_CUDA=0 PYENGINE_NATIVE=1 new/bin/python setup.py" in planned) is without_cuda
    assert "requirements-dev.txt" not in planned


@pytest.fixture
def setup_py(monkeypatch, tmp_path):
    """Return a function that runs setup.py without a compiler on PATH and returns its names."""
    monkeypatch.setattr("setuptools.setup", lambda **settings: None)
    for name in ("CXX", "CUDACXX", "PYENGINE_CUDA", "PYENGINE_NO_EXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return lambda: runpy.run_path(str(ROOT / "setup.py"))


WITHOUT = "PYENGINE_NO_EXT=1 pip install ."


@pytest.mark.parametrize(
    ("cxx", "missing"),
    [("", "neither c++, g++ nor clang++ is on PATH"), ("/no/g++ -O1", "CXX=/no/g++ was not found")],
)
def test_a_build_without_a_compiler_says_so_in_one_sentence(monkeypatch, setup_py, cxx, missing):
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(SystemExit, match=f"{re.escape(missing)}: install g.*{WITHOUT}$"):
        setup_py()
    monkeypatch.setenv("PYENGINE_NO_EXT", "1")
    assert setup_py()["extensions"]() == []


@pytest.mark.parametrize("cxx", ["", f"{sys.executable} -x"])
def test_a_build_that_fails_ends_with_what_to_type(monkeypatch, setup_py, tmp_path, cxx):
    (tmp_path / "clang++").touch(mode=0o755)
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(SystemExit, match=WITHOUT):
        setup_py()["run"](["/bin/false"])
    setup_py()["run"](["/bin/true"])


def test_no_file_installs_the_other_project_of_the_same_name():
    assert 'name = "pyengine-torch"' in PROJECT
    foreign = re.compile(r"\binstall(?: -{1,2}[\w-]+)* [\"']?pyengine\b(?!-torch)")
    folders = ("docs", "pyengine", "tests", "examples", "benchmarks", "csrc")
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    texts = [path for path in paths if path.suffix in (".md", ".py", ".sh", ".txt", ".cpp", ".h")]
    assert [str(path) for path in texts if foreign.search(path.read_text())] == []


WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


@pytest.mark.skipif(not WORKFLOW.exists(), reason="an sdist has no workflow")
def test_the_workflow_makes_what_ci_run_makes_and_pins_its_actions():
    workflow, ci_run = WORKFLOW.read_text(), re.sub(r"#.*", "", (ROOT / ".ci/run").read_text())
    targets = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
    made = {name for listed in re.findall(r"targets: ([\w -]+)", workflow) for name in listed.split()}
    wanted = {name for listed in re.findall(r"\bmake (.*)", ci_run) for name in listed.split()} & targets
    assert made == wanted - {"xla-env", "test-xla", "matrix-small"}  # these need an environment of 2 GB
    actions = re.findall(r"uses: (.*)", workflow)
    assert [action for action in actions if not re.search(r"@v\d+\.\d+\.\d+$", action)] == []


def test_the_version_is_one():
    assert f'version = "{pyengine.__version__}"' in PROJECT
    assert f"\nversion: {pyengine.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so nothing to compare with")
def test_the_sdist_holds_every_tracked_file_that_a_build_or_a_test_needs(tmp_path):
    _run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path))
    listed = (tmp_path / "pyengine_torch.egg-info" / "SOURCES.txt").read_text().splitlines()
    packed = {os.path.normpath(path) for path in listed}
    tracked = {
        path for path in _run("git", "ls-files", *IN_SDIST, "Makefile").splitlines() if (ROOT / path).exists()
    }
    assert tracked - packed == set()
    assert {path for path in packed if path.endswith((".so", ".pyc"))} == set()
