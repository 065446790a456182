"""The public API as a user's type checker sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("user_script.py").read_text(encoding="utf-8")
CONFIG = f"""[mypy]
strict = True
mypy_path = {ROOT}
[mypy-pyengine.*]
follow_imports = silent
"""
WRONG = {
    'wire="bf16"': ('wire="bf17"', 'Argument "wire" to "GradSync"'),
    'nonfinite="skip"': ('nonfinite="ignore"', 'Argument "nonfinite" to "GradSync"'),
    'accumulator="exact"': ('accumulator="fp16"', 'Argument "accumulator" to "attach"'),
    "accumulate=8, ": ("acumulate=8, ", 'Unexpected keyword argument "acumulate" for "attach"'),
}


@pytest.mark.slow  # mypy reads torch
def test_a_users_script_is_checked_strictly_and_wrong_arguments_are_found(tmp_path):
    (tmp_path / "mypy.ini").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "right.py").write_text(SCRIPT, encoding="utf-8")
    for index, (right, (wrong, _)) in enumerate(WRONG.items()):
        assert right in SCRIPT
        (tmp_path / f"wrong_{index}.py").write_text(SCRIPT.replace(right, wrong), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", *sorted(path.name for path in tmp_path.glob("*.py"))]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    assert not [line for line in found if line.startswith("right.py")]
    for index, (_, message) in enumerate(WRONG.values()):
        assert any(line.startswith(f"wrong_{index}.py") and message in line for line in found), found
