"""A run has its own processes: however it ends, the study is informed and no process is left."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
from study_records import asked
from study_subjects import goes, lives

from pyengine.cli.study import supervise
from pyengine.cli.study.supervise import Beats, RunOutcome, Watch, execute


def ran(
    function: str, folder: Path, watch: Watch = lambda done, accuracy: None, run_s: float = 60.0
) -> RunOutcome:
    return execute(asked(f"study_subjects:{function}", run_timeout_s=run_s), folder / "log.txt", watch)


@pytest.mark.slow
def test_worker_that_is_killed_is_a_failure_that_names_it(tmp_path):
    outcome = ran("killed", tmp_path)
    assert (outcome.status, outcome.traces, outcome.steps) == ("failed", [], 0)
    assert "of 2 failed (exit code -9)" in outcome.reason


@pytest.mark.slow
def test_interrupt_ends_every_process_also_those_of_workers(tmp_path, monkeypatch):
    """Their temporary files are deleted as well."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # reads TMPDIR again

    def interrupt(done, accuracy):
        if len(_pids(tmp_path)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pytest.fail(f"{ran('beats_for_ever', tmp_path, interrupt)}: {(tmp_path / 'log.txt').read_text()}")
    assert all(goes(pid) for pid in _pids(tmp_path))
    assert list((tmp_path / "tmp").iterdir()) == []


def _pids(folder: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)\n", (folder / "log.txt").read_text())]


@pytest.mark.slow
def test_processes_end_when_the_study_was_killed():
    run = (
        "import os; from pyengine.cli.study.supervise import _end_with; parent = os.getppid(); os.setsid(); "
    )
    run += "print(os.getpid(), flush=True); _end_with(parent)"
    study = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {run!r}])"
    process = subprocess.Popen([sys.executable, "-c", study], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert lives(pid)
    process.kill()
    process.wait()
    assert goes(pid)


LONGER = "; a larger --stall-timeout gives them more time"


class _Clock:
    """A simulated clock, and a child process that never ends and writes beats at the given seconds."""

    def __init__(self, beats: Beats, *at: float) -> None:
        self._beats, self._at, self._now = beats, list(at), 0.0

    def monotonic(self) -> float:
        return self._now

    def is_alive(self) -> bool:
        return True

    def join(self, seconds: float) -> None:
        self._now += seconds
        if self._at and self._at[0] <= self._now:
            self._at.pop(0)
            with self._beats.path.open("a") as file:
                file.write('{"done": 0}\n')


@pytest.mark.parametrize(
    ("stall_s", "at", "reason", "ended"),
    [
        (20, (), f"its workers had not all started after 120 s{LONGER}", 120),
        (200, (), f"its workers had not all started after 200 s{LONGER}", 200),
        (20, (90,), "no progress for 20 s after step 0 (--stall-timeout)", 110),
        (20, (90, 105), "no progress for 20 s after step 0 (--stall-timeout)", 125),
    ],
)
def test_start_of_the_workers_is_no_stall(tmp_path, monkeypatch, stall_s, at, reason, ended):
    beats = Beats(tmp_path / "beats")
    clock = _Clock(beats, *at)
    monkeypatch.setattr(supervise, "time", clock)
    run = asked("", stall_timeout_s=stall_s, run_timeout_s=3600)
    found = supervise._supervise(clock, beats, run, lambda done, accuracy: None)
    assert found == ("stalled", reason)
    assert ended <= clock.monotonic() <= ended + 1


def test_run_that_takes_too_long_is_ended(tmp_path):
    outcome = ran("right", tmp_path, run_s=0.5)
    assert (outcome.status, outcome.steps) == ("timed out", 0)
    assert outcome.reason == "not done after 0.5 s, at step 0 (--run-timeout)"


@pytest.mark.parametrize(
    ("text", "new", "done", "accuracy"),
    [
        ("", False, 0, None),
        ('{"done": 3}\n', True, 3, None),
        ('{"done": 3}\n{"done": 3, "accuracy": 0.5}\n{"done": 4}\n', True, 4, 0.5),
        ('{"done": 3}\n{"do', True, 3, None),
        ('{"do', False, 0, None),
    ],
)
def test_beats_are_read_as_far_as_they_are_whole(tmp_path, text, new, done, accuracy):
    beats = Beats(tmp_path / "beats")
    beats.path.write_text(text)
    assert (beats.read(), beats.done, beats.accuracy) == (new, done, accuracy)


def test_beats_are_read_on(tmp_path):
    beats = Beats(tmp_path / "beats")
    assert not beats.read()
    beats.path.write_text('{"done": 1}\n{"do')
    assert beats.read()
    with beats.path.open("a") as file:
        file.write('ne": 2}\n')
    assert beats.read()
    assert beats.done == 2
    assert not beats.read()


def test_a_failure_is_named_by_the_first_line_of_its_exception():
    try:
        raise ValueError("planted\n second line")
    except ValueError:
        text = traceback.format_exc()
    shortened = supervise._shorten(f"worker 1 of 2 failed (exit code 1)\n{text}")
    assert shortened == "worker 1 of 2 failed (exit code 1): ValueError: planted"
    assert supervise._shorten("worker 1 of 2 failed") == "worker 1 of 2 failed"
    killed = "worker 1 of 2 failed (exit code -9)\nSignal 9 (SIGKILL) received by PID 7"
    assert supervise._shorten(killed).endswith("(exit code -9): Signal 9 (SIGKILL) received by PID 7")
