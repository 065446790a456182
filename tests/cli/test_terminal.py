"""Commands handle any stdout: one that only encodes ASCII, a closed one, or a full disk."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from marks import rest
from study_records import made

from pyengine.cli.arguments import Conflict
from pyengine.cli.doctor import run as doctor
from pyengine.cli.doctor.checks import warn
from pyengine.cli.main import build_parser, main
from pyengine.cli.study import run as study
from pyengine.cli.study.arguments import settings
from pyengine.cli.study.store import Store
from pyengine.cli.terminal import print_json, read_json

PLAN = ["plan", "--global-batch", "64", "--micro-batch", "8"]
Patch = pytest.MonkeyPatch


@contextmanager
def stdout(patch: Patch, raw: io.BufferedIOBase, errors: str = "strict") -> Iterator[io.TextIOWrapper]:
    with patch.context() as patched:
        stream = io.TextIOWrapper(raw, encoding="ascii", errors=errors)
        patched.setattr(sys, "stdout", stream)
        yield stream


def test_a_result_file_moves_no_cursor():
    text = r'{"\u001b[2Ja": ["\u009b1m", "\u202e", "\u0007"], "b": "two\nlines, \u00e4 [x]"}'
    assert read_json(text) == {"?[2Ja": ["?1m", "?", "?"], "b": "two\nlines, ä [x]"}


def test_a_study_names_a_foreign_one_without_its_escapes(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"event": "study", "machine": "\\u001b[2J"}\n')
    with pytest.raises(Conflict, match=r"contains a study with machine \?\[2J, but this one has here"):
        Store(tmp_path, {"machine": "here"})


def test_json_lines_have_no_nan(capsys):
    print_json("step", loss=float("nan"), grad_norms={"weight": float("inf")}, count=2.0)
    assert capsys.readouterr().out == (
        '{"event": "step", "loss": null, "grad_norms": {"weight": null}, "count": 2.0}\n'
    )


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_plan_prints_to_a_terminal_of_ascii(monkeypatch, errors):
    with stdout(monkeypatch, io.BytesIO(), errors) as stream:
        assert main(PLAN) == 0
        assert "64 x 1 = 32 x 2" in stream.buffer.getvalue().decode("ascii")


def test_plan_prints_nothing_where_stdout_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(PLAN) == 0


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["lines", "json"])
def test_doctor_prints_to_a_terminal_of_ascii(monkeypatch, options):
    monkeypatch.setattr(doctor, "CHECKS", {"host": lambda: warn("host", "3 × slower", "mend → it")})
    with stdout(monkeypatch, io.BytesIO()) as stream:
        assert main(["doctor", *options]) == 0
        printed = stream.buffer.getvalue().decode("ascii")
    wanted = ["3 \\u00d7 slower"] if options else ["3 x slower", "-> mend -> it"]
    assert all(text in printed for text in wanted)


@pytest.mark.slow
def test_study_prints_and_writes_its_report_on_a_system_of_ascii(tmp_path):
    """All runs are already stored, so none is started."""
    arguments = ["--workers", "1,2", "--batch", "64", "--repeats", "1", "--out", str(tmp_path)]
    options = settings(build_parser().parse_args(["study", *arguments]))
    store = Store(tmp_path, {**options.binding(), "machine": study.card()})
    for workers in options.workers:
        store.add(made(workers, 64))
    store.close()
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = run("study", *arguments, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyengine", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env=os.environ | environment
    )


TINY = {
    "train": "--model cnn --workers 1 --steps 2 --accumulate 2 --micro-batch 2",
    "verify": "--model cnn --workers 2 --steps 1 --micro-batches 2",
    "bench": "--rounds 3 --variants floor,engine --model small0",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", *rest("verify", "bench")])
def test_commands_print_from_their_workers_to_a_terminal_of_ascii(command):
    done = run(command, *TINY[command].split(), PYTHONIOENCODING="ascii")
    assert (done.returncode, "UnicodeEncodeError" in done.stderr) == (0, False), done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_output_on_a_full_disk_is_reported_without_a_traceback(monkeypatch, capsys):
    with stdout(monkeypatch, Path("/dev/full").open("wb")):
        assert main([*PLAN, "--json"]) == 1
        sys.stdout.flush()  # discards the rest, so that the interpreter ends without an error
    assert capsys.readouterr().err == "cannot write the output: No space left on device\n"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_output_that_nobody_takes_any_more_ends_the_command_quietly(monkeypatch, capsys, options):
    reader, writer = os.pipe()
    os.close(reader)
    with stdout(monkeypatch, os.fdopen(writer, "wb")):
        assert main([*PLAN, *options]) == 141
        sys.stdout.flush()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", *rest("bench")])
def test_workers_end_quietly_when_nobody_takes_their_output(command):
    # Print more lines than a pipe can hold, and read only the first one.
    arguments = TINY[command].replace("--steps 2", "--steps 2000").replace("--rounds 3", "--rounds 3000")
    process = subprocess.Popen(
        [sys.executable, "-m", "pyengine", command, *arguments.split(), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith('{"event"')
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(60), errors) == (141, "")


def test_study_on_a_full_disk_reports_that_what_was_measured_stays(monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise OSError(28, "No space left on device", str(tmp_path / "runs.jsonl"))

    monkeypatch.setattr(study, "study", fail)
    assert main(["study", "--workers", "1", "--out", str(tmp_path)]) == 3
    printed = capsys.readouterr().err
    assert "the study ended early: [Errno 28] No space left on device" in printed
    assert f"what was measured is in {tmp_path}, and the same command resumes" in printed
