"""Running the real command."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import forked
import pytest

_TINY = ("--steps", "3", "--accumulate", "3", "--micro-batch", "2")


@cache
def _run(folder: Path, arguments: tuple[str, ...]) -> list[dict[str, Any]]:
    done = forked.python("-m", "pyengine", "train", *_TINY, "--json", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Give `train("--mode", "ddp")`: run the command with tiny settings, once a session, and return its JSON
    lines.

    It runs in a folder of its own: files it is to write are named without one.
    """
    folder = tmp_path_factory.mktemp("train")
    return lambda *arguments: _run(folder, arguments)
