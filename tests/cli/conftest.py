"""A fixture that runs the real command."""

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
    """Return a function: `train("--mode", "ddp")` runs the command with tiny settings and returns JSON lines.

    Equal calls run the command once per session. It runs in its own folder; pass output files as bare names.
    """
    folder = tmp_path_factory.mktemp("train")
    return lambda *arguments: _run(folder, arguments)
