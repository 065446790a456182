"""Help that teaches and errors that say what to do; no worker is started."""

from __future__ import annotations

import sys

import pytest

import pyengine.cli
from pyengine.cli.main import main

BAD_TRAIN = [
    (("--workers", "0"), "argument --workers: got 0, need a whole number of at least 1"),
    (("--accumulate", "two"), "argument --accumulate: got two, need a whole number of at least 1"),
    (("--lr", "-1"), "argument --lr: got -1, need a finite number above 0"),
    (("--lr", "nan"), "argument --lr: got nan, need a finite number above 0"),
    (("--model", "rnn"), "argument --model: invalid choice: 'rnn'"),
    (
        ("--mode", "ddp", "--wire", "bf16"),
        "got bf16 with --mode ddp, which has no wire: leave it out, or use",
    ),
    (("--model", "gpt", "--trace", "/"), "argument --trace: cannot write / ("),
    (("--trace", "no/where.json"), "no/where-gpt.json (No such file or directory): name a file in a folder"),
    (("--trace", "/proc/trace.json"), "argument --trace: cannot write /proc/trace-gpt.json ("),
    (
        ("--mode", "ddp", "--checkpoints", "runs"),
        "argument --checkpoints: got runs with --mode ddp, which has",
    ),
    (("--checkpoints", "/proc/runs"), "argument --checkpoints: cannot create /proc/runs/gpt ("),
    (("--mode", "ddp", "--accumulator", "native"), "argument --accumulator: got native with --mode ddp"),
]
BAD_VERIFY = [
    (("--workers", "0,1"), "argument --workers: got 0,1, need different whole numbers of at least 1"),
    (("--workers", "2,2"), "argument --workers: got 2,2, need different whole numbers of at least 1"),
    (("--train", "mine"), "argument --train: got mine, need MODULE:FUNCTION"),
    (("--train", "mine:train", "--model", "gpt"), "argument --model: not allowed with argument --train"),
    (("--train", "no_such:train"), "there is no module no_such here"),
    (("--train", "json:train"), "json has no function train"),
]
# 99999 is more than any machine has cores for.
CROWDS = [
    (name, arguments, "argument --workers: workers=99999: need at most")
    for name, arguments in (
        ("train", ("--workers", "99999")),
        ("verify", ("--workers", "1,99999")),
        ("study", ("--workers", "1,99999")),
        ("bench", ("step", "--workers", "99999")),
    )
]
BAD = CROWDS + [("train", *case) for case in BAD_TRAIN] + [("verify", *case) for case in BAD_VERIFY]


@pytest.mark.parametrize(
    ("name", "arguments", "message"), BAD, ids=lambda value: value if isinstance(value, str) else None
)
def test_bad_argument_says_what_was_got_and_needed(
    capsys: pytest.CaptureFixture[str], name: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_plan_takes_any_number_of_workers_since_it_starts_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--global-batch", "99999", "--workers", "99999", "--json"]) == 0
    assert '"workers": 99999' in capsys.readouterr().out


def test_help_shows_examples_and_modes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "python -m pyengine train --model gpt --wire bf16" in text
    assert all(
        mode in text for mode in ("engine    pe.GradSync", "ddp-hook  pe.attach", "ddp       plain DDP")
    )


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize(("module", "package"), [("rich", "rich"), ("sklearn", "scikit-learn")])
def test_missing_extra_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    folders = ("pyengine.cli.train", "pyengine.cli.tasks")
    for name in [name for name in sys.modules if name.split(".")[0] == module or name.startswith(folders)]:
        monkeypatch.delitem(sys.modules, name)
    for folder in ("train", "tasks"):
        monkeypatch.delattr(pyengine.cli, folder, raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # Python's own way to make an import fail
    assert main(["train"]) == 1
    message = (
        f"train needs {package}, which is not installed: run pip install '.[train]' in a clone of pyengine\n"
    )
    assert capsys.readouterr().err == message
