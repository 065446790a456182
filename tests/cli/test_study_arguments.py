"""The arguments of `study`: errors that say what to do, defaults, and what a missing package is called."""

from __future__ import annotations

import sys

import pytest

import pyengine.cli
from pyengine.cli.main import build_parser, main
from pyengine.cli.study.arguments import BUILT_IN, settings
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask

BAD = [
    (("--workers", "2,4"), "argument --workers: got 2,4, need 1 among them: speed-up is against one worker"),
    (("--workers", "1,1"), "argument --workers: got 1,1, need different whole numbers of at least 1"),
    (("--batch", "0"), "argument --batch: got 0, need different whole numbers of at least 1"),
    (("--fixed", "local"), "argument --fixed: invalid choice: 'local'"),
    (("--epochs", "inf"), "argument --epochs: got inf, need a finite number above 0"),
    (("--target", "95"), "argument --target: got 95, need a share above 0 and up to 1: 0.95 is 95 %"),
    (("--dataset-size", "2000"), "argument --dataset-size: got 2000, and cnn has 1437 samples"),
    (("--train", "mine:train"), "argument --dataset-size: missing with --train mine:train"),
    (("--train", "mine:train", "--model", "gpt"), "argument --model: not allowed with argument --train"),
    (("--train", "mine", "--dataset-size", "8"), "argument --train: got mine, need MODULE:FUNCTION"),
    (("--train", "no_such:train", "--dataset-size", "8"), "there is no module no_such here"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_argument_says_what_is_needed(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["study", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = settings(build_parser().parse_args(["study"]))
    assert (found.workers, found.batches, found.repeats) == ((1, 2, 4, 8), (32, 64, 128, 256), 3)
    assert (found.subject, found.target, found.fixed) == ("cnn", BUILT_IN.format("cnn"), "global")
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(
        word in text
        for word in ("default: 1,2,4,8", "default: 32,64,128,256", "study.watch(sync", "exit code")
    )


@pytest.mark.parametrize(("model", "task"), [("cnn", DigitsTask), ("gpt", TextTask)])
def test_largest_dataset_is_what_the_task_has(model: str, task: type) -> None:
    most = task().num_samples
    assert settings(build_parser().parse_args(["study", "--model", model, "--dataset-size", str(most)]))
    with pytest.raises(SystemExit):
        main(["study", "--model", model, "--dataset-size", str(most + 1)])


@pytest.mark.parametrize("package", ["matplotlib", "jinja2", "psutil", "rich"])
def test_missing_package_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package or ".cli.study" in name]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in vars(pyengine.cli) if name.startswith("study")]:
        monkeypatch.delattr(pyengine.cli, name)
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to make an import fail
    assert main(["study"]) == 1
    assert capsys.readouterr().err == (
        f"study needs {package}, which is not installed: run pip install '.[study]' in a clone of pyengine\n"
    )
