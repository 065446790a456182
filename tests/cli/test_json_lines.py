"""Whatever command is run with `--json`, stdout is one JSON object a line, each of which says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import pytest
from marks import rest

from pyengine.cli.main import _COMMANDS

HERE = Path(__file__).parent  # where `subjects` and `study_subjects` are importable
pytestmark = pytest.mark.slow
# Arguments of a short run, and the events that it tells of.
SHORT = {
    "train": (
        "--model cnn --workers 1 --steps 1 --accumulate 1 --trace {folder}/trace.json",
        {"start", "step", "trained", "comparison", "trace"},
    ),
    "verify": ("--train subjects:right --workers 1 --steps 1", {"run", "verdict"}),
    "plan": ("--workers 1", {"plan"}),
    "study": (
        (
            "--train study_subjects:right --workers 1 --batch 8 --dataset-size 64 --repeats 1 --out "
            "{folder}/study"
        ),
        {"plan", "run", "cell", "report"},
    ),
    "bench": (
        "kernels --ops pack --megabytes 1 --seconds 0.01",
        {"start", "progress", "kernel", "conclusion"},
    ),
    "doctor": ("", {"finding", "verdict"}),
}

SOME = ("plan", "study")  # whatever takes lines of `train` and of `bench` reads them as JSON


@pytest.mark.parametrize("command", [*SOME, *rest(*(name for name in _COMMANDS if name not in SOME))])
def test_stdout_is_json_lines_that_name_their_events(command, tmp_path):
    assert command in SHORT, "a command needs a row of short arguments here"
    arguments, expected = SHORT[command]
    words = arguments.format(folder=tmp_path).split()
    done = forked.python("-m", "pyengine", command, "--json", *words, cwd=HERE)
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert expected <= {line["event"] for line in lines}
