"""The public API as a user's type checker sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("user_script.py").read_text(encoding="utf-8")
# The settings for torch are those of pyproject.toml, so that what `make check` has read of it is still good.
MYPY = f"""[mypy]
strict = True
mypy_path = {ROOT}
cache_dir = {ROOT}/.mypy_cache
untyped_calls_exclude = torch, matplotlib
[mypy-torch.*]
implicit_reexport = True
[mypy-pyengine.*]
follow_imports = silent
"""
PYRIGHT = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
# Right: (wrong, the message of mypy, the message of pyright).
WRONG = {
    'wire="bf16"': ('wire="bf17"', 'Argument "wire" to "GradSync"', 'to parameter "wire"'),
    'nonfinite="skip"': (
        'nonfinite="ignore"',
        'Argument "nonfinite" to "GradSync"',
        'to parameter "nonfinite"',
    ),
    'accumulator="exact"': (
        'accumulator="fp16"',
        'Argument "accumulator" to "attach"',
        'to parameter "accumulator"',
    ),
    "accumulate=8, ": (
        "acumulate=8, ",
        'Unexpected keyword argument "acumulate" for "attach"',
        'No parameter named "acumulate"',
    ),
}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with the user's script, right.py, and one with each wrong argument, wrong_<index>.py."""
    (tmp_path / "right.py").write_text(SCRIPT, encoding="utf-8")
    for index, (right, (wrong, *_)) in enumerate(WRONG.items()):
        assert right in SCRIPT
        (tmp_path / f"wrong_{index}.py").write_text(SCRIPT.replace(right, wrong), encoding="utf-8")
    return tmp_path


def _run(folder: Path, *module_and_arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *module_and_arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.mark.slow  # mypy reads torch, unless `make check` has
def test_mypy_accepts_a_users_script_and_finds_wrong_arguments(scripts):
    (scripts / "mypy.ini").write_text(MYPY, encoding="utf-8")
    found = _run(scripts, "mypy", *sorted(path.name for path in scripts.glob("*.py"))).splitlines()
    assert not [line for line in found if line.startswith("right.py")]
    for index, (_, message, _) in enumerate(WRONG.values()):
        assert any(line.startswith(f"wrong_{index}.py") and message in line for line in found), found


@pytest.mark.slow  # pyright reads torch
def test_pyright_accepts_a_users_script_and_finds_wrong_arguments(scripts):
    pytest.importorskip("basedpyright", reason="pyright from the package index is not installed")
    (scripts / "pyrightconfig.json").write_text(json.dumps(PYRIGHT), encoding="utf-8")
    output = _run(scripts, "basedpyright", "--pythonpath", sys.executable, "--outputjson")
    found = [(Path(each["file"]).name, each["message"]) for each in json.loads(output)["generalDiagnostics"]]
    assert not [message for name, message in found if name == "right.py"]
    for index, (_, _, message) in enumerate(WRONG.values()):
        assert any(name == f"wrong_{index}.py" and message in text for name, text in found), found
