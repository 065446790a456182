"""The public API as a user's type checker sees it; `make check` reads user_script.py with mypy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

SCRIPT = Path(__file__).with_name("user_script.py")
PYRIGHT = {
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": True,
    "include": [str(SCRIPT)],
    "extraPaths": [str(ROOT)],
}


@pytest.mark.slow  # pyright reads torch
def test_pyright_accepts_a_users_script_and_finds_wrong_arguments(tmp_path):
    pytest.importorskip("basedpyright", reason="pyright from the package index is not installed")
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps(PYRIGHT), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--project", str(config)]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
