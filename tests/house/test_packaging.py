"""What is installed for whom, and under which name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import pyengine

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PINS = sorted(path.name for path in ROOT.glob("requirements-*.txt"))
_TEXTS = (".md", ".py", ".sh", ".txt", ".cpp", ".h")
_NAME = re.compile(r"^\s*[\"']?([A-Za-z][\w-]*)")
# `pyengine` on the package index is another project.
_FOREIGN = re.compile(r"\binstall(?: -{1,2}[\w-]+)* [\"']?pyengine\b(?!-torch)")


def names(requirements: list[str]) -> set[str]:
    """Return the packages of requirements, whatever their versions."""
    return {found[1].lower() for line in requirements if (found := _NAME.match(line))}


def pinned(file: str) -> set[str]:
    """Return the packages that a file pins itself."""
    return names((ROOT / file).read_text().splitlines())


def listed(key: str) -> set[str]:
    """Return the packages of one of pyproject.toml's lists."""
    (found,) = re.findall(rf"^{key} = \[(.*)\]$", PROJECT, re.MULTILINE)
    return names(re.findall(r'"([^"]+)"', found))


def test_make_run_installs_what_train_and_the_build_need_and_nothing_else():
    assert pinned("requirements-run.txt") == {"torch"} | listed("requires") | listed("train")


@pytest.mark.parametrize("file", PINS)
def test_a_package_is_pinned_in_one_file(file):
    others = set().union(*(pinned(other) for other in PINS if other != file))
    assert pinned(file) & others == set()


def test_what_tests_and_commands_need_is_pinned():
    needed = listed("dev") | listed("study") | listed("telemetry") | listed("adapters") | listed("docs")
    assert needed - set().union(*map(pinned, PINS)) == set()
    assert "-r requirements-run.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()


def test_make_compiles_with_the_tools_that_a_build_asks_for():
    (tools,) = re.findall(r"^BUILD_TOOLS := (.*)$", MAKEFILE, re.MULTILINE)
    assert set(tools.split()) == listed("requires")


def planned(target: str, *settings: str) -> str:
    """Return what make would do for a target in a new checkout."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", target, "VENV=new", *settings]
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environ)
    return done.stdout


def test_make_run_leaves_the_extras_of_tests_out_and_make_test_brings_them():
    assert "requirements-dev.txt" not in planned("run")
    assert "requirements-dev.txt" in planned("test")


@pytest.mark.parametrize(
    ("settings", "without_cuda"),
    [(["DEVICE="], True), (["DEVICE=/dev/nvidiactl"], False), (["DEVICE=", "PYENGINE_CUDA=1"], False)],
    ids=["no device", "device", "asked for"],
)
def test_make_run_leaves_cuda_out_only_where_there_is_no_device_and_nobody_asked(settings, without_cuda):
    assert (
        "PYENGINE_CUDA=0 PYENGINE_NATIVE=1 new/bin/python setup.py" in planned("run", *settings)
    ) is without_cuda


def test_what_tests_build_has_every_instruction_set():
    assert "PYENGINE_NATIVE" not in planned("test", "DEVICE=")


def test_make_run_says_that_a_device_gets_no_kernels_for_want_of_nvcc():
    assert "THE CORE GETS NO CUDA KERNELS" in planned("run", "DEVICE=/dev/nvidiactl")


def test_nothing_says_to_install_the_other_project_of_our_name():
    assert 'name = "pyengine-torch"' in PROJECT
    folders = [ROOT / name for name in ("docs", "pyengine", "tests", "examples", "benchmarks", "csrc")]
    texts = [path for folder in folders for path in folder.rglob("*.*") if path != Path(__file__)]
    texts = [path for path in [*ROOT.glob("*.*"), *texts] if path.suffix in _TEXTS]
    said = [str(path.relative_to(ROOT)) for path in texts if _FOREIGN.search(path.read_text())]
    assert said == []


@pytest.mark.parametrize("foreign", ["pip install pyengine", "pip install -U 'pyengine[train]'"])
def test_the_other_project_would_be_found(foreign):
    assert _FOREIGN.search(foreign) and not _FOREIGN.search(foreign.replace("pyengine", "pyengine-torch"))


def test_the_version_is_one():
    assert f'version = "{pyengine.__version__}"' in PROJECT
