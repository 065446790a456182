"""SIGINT and SIGTERM end every command at any moment: one line, 128 + the signal, no traceback, no orphan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import forked
import pytest
from command import TRAIN
from marks import rest
from processes import left, marked
from stops import BOTH, COMMANDS, Stop, problem, stop

import pyengine
from pyengine.cli import stopping

SOME = ("train, saved", "bench")


def test_a_signal_while_torch_is_being_imported_ends_with_one_line(tmp_path):
    found = stop(COMMANDS["plan"], signal.SIGINT, 0.0, tmp_path, is_group=False)
    assert found == Stop(130, ["interrupted: nothing had begun"], [])


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_raised_in_the_body_and_a_second_one_ignored(number, capsys):
    before = [signal.getsignal(each) for each in BOTH]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised, stopping.raised():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
    assert raised.value.__context__ is None  # the second one did nothing
    assert stopping.report(raised.value, "all is well") == 128 + number
    assert capsys.readouterr().err == f"{stopping._WORDS[number]}: all is well\n"
    assert [signal.getsignal(each) for each in BOTH] == before


def test_an_exit_of_another_kind_is_none_of_its_business():
    with pytest.raises(SystemExit, match="2"):
        stopping.report(SystemExit(2), "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, *rest(signal.SIGTERM)])
@pytest.mark.parametrize("command", [*SOME, *rest(*(name for name in COMMANDS if name not in SOME))])
def test_a_signal_ends_a_command_cleanly(tmp_path, command, number):
    for seconds in (0.4, 6.0):
        found = stop(COMMANDS[command], number, seconds, tmp_path, is_group=number == signal.SIGINT)
        assert problem(found, number) == "", seconds


# --- Saving after a signal ---


SAVED = (*TRAIN, "--model", "gpt", "--json", "--steps", "10", "--accumulate", "2", "--checkpoints")


def _output(name: str, folder: Path) -> str:
    """Return the output of an undisturbed command that saves under `name`."""
    done = forked.python(*SAVED[1:], name, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _losses(output: str) -> dict[int, float]:
    lines = map(json.loads, output.splitlines())
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def _stopped(command: list[str], number: signal.Signals, folder: Path) -> tuple[int, str, str]:
    """Run a command until it has trained a few steps, send a signal to its first process, and wait."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYENGINE_TEST_MARK": mark},
    )
    output = ""
    while '"step": 4' not in output:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        output += line
    process.send_signal(number)
    rest, errors = process.communicate(timeout=120)
    assert left(marked, mark) == []
    return process.returncode, output + rest, errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, *rest(signal.SIGINT)])
def test_train_saves_behind_a_signal_and_goes_on_to_the_same_losses(tmp_path, number):
    undisturbed = _output("one", tmp_path)
    code, output, errors = _stopped([*SAVED, "other"], number, tmp_path)
    assert code == 128 + number
    assert errors.count("\n") == 1 and f"what was saved is in {tmp_path}/other/gpt" in errors
    first, second = _losses(output), _losses(_output("other", tmp_path))
    assert min(second) == max(first) + 1  # no step runs twice, and none is left out
    assert first | second == _losses(undisturbed)


@pytest.mark.slow
def test_train_saves_behind_torchruns_signal(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, *SAVED[1:], "saved"]
    _, output, errors = _stopped(command, signal.SIGTERM, tmp_path)
    last = max(_losses(output)) + 1
    assert len([*(tmp_path / "saved" / "gpt").glob(f"step-{last:010}.rank-*-of-2.pt")]) == 2
    assert "terminated: every worker has ended; what was saved is in" in errors
    assert f"{Path(pyengine.__file__).parent}/" not in errors  # torchrun itself ends with a traceback
