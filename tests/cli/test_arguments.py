"""Help texts with examples, and errors that name the expected values; no worker is started."""

from __future__ import annotations

import sys

import pytest

import pyengine.cli
from pyengine.cli.main import build_parser, main
from pyengine.cli.study.arguments import BUILT_IN, settings
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask

BAD_TRAIN = [
    (("--workers", "0"), "argument --workers: got 0, expected a whole number of at least 1"),
    (("--seed", str(2**63)), "argument --seed: got 9223372036854775808, expected a whole number below 2**63"),
    (("--accumulate", "two"), "argument --accumulate: got two, expected a whole number of at least 1"),
    (("--lr", "-1"), "argument --lr: got -1, expected a finite number above 0"),
    (("--model", "rnn"), "argument --model: invalid choice: 'rnn'"),
    (("--wire", "int4"), "argument --wire: invalid choice: 'int4' (choose from 'fp32', 'bf16'"),
    (
        ("--mode", "ddp", "--wire", "bf16"),
        "got bf16 with --mode ddp, which has no wire: leave it out, or use",
    ),
    (("--model", "gpt", "--trace", "/"), "argument --trace: / is a folder: name a file"),
    (("--trace", "no/where.json"), "no/where-gpt.json (No such file or directory): name a file in a folder"),
    (("--trace", "/proc/trace.json"), "argument --trace: cannot write /proc/trace-gpt.json ("),
    (
        ("--mode", "ddp", "--checkpoints", "runs"),
        "argument --checkpoints: got runs with --mode ddp, which has",
    ),
    (("--checkpoints", "/proc/runs"), "argument --checkpoints: cannot create /proc/runs/gpt ("),
    (("--mode", "ddp", "--accumulator", "native"), "argument --accumulator: got native with --mode ddp"),
    (("--checkpoint-every", "5"), "argument --checkpoint-every: got 5 without --checkpoints: name a folder"),
]
BAD_VERIFY = [
    (("--workers", "0,1"), "argument --workers: got 0,1, expected different whole numbers of at least 1"),
    (("--workers", "2,2"), "argument --workers: got 2,2, expected different whole numbers of at least 1"),
    (("--train", "mine"), "argument --train: got mine, expected MODULE:FUNCTION"),
    (("--train", "mine:train", "--model", "gpt"), "argument --model: not allowed with argument --train"),
    (("--train", "no_such:train"), "there is no module no_such here"),
    (("--train", "json:train"), "json has no function train"),
]
BAD_PLAN = [
    (("--workers", "0"), "argument --workers: got 0, expected a whole number of at least 1"),
    (("--global-batch", "8,x"), "argument --global-batch: got x, expected a whole number of at least 1"),
    (("--lr", "inf"), "argument --lr: got inf, expected a finite number above 0"),
    (
        ("--from", "steps", "--workers", "1,2"),
        "got 1,2 with --from, which splits no batch: leave one of the two",
    ),
    (("--from", "steps", "--micro-batch", "8"), "argument --micro-batch: got 8 with --from"),
    (("--from", "steps", "--dataset-size", "9"), "argument --dataset-size: got 9 with --from"),
]
BAD_STUDY = [
    (("--workers", "2,4"), "argument --workers: got 2,4, expected 1 among them, the baseline for speed-ups"),
    (("--batch", "0"), "argument --batch: got 0, expected different whole numbers of at least 1"),
    (("--fixed", "local"), "argument --fixed: invalid choice: 'local'"),
    (("--epochs", "1e308"), "argument --epochs: got 1e+308, expected fewer than 2**53 samples"),
    (("--epochs", "inf"), "argument --epochs: got inf, expected a finite number above 0"),
    (("--target", "95"), "argument --target: got 95, expected a share above 0 and at most 1; 0.95 is 95 %"),
    (("--dataset-size", "2000"), "argument --dataset-size: got 2000, but cnn has 1437 samples"),
    (("--train", "mine:train"), "argument --dataset-size: missing with --train mine:train"),
    (("--train", "mine:train", "--model", "gpt"), "argument --model: not allowed with argument --train"),
]
BAD_BENCH = [
    (("--variants", "engine,ours"), "argument --variants: got engine,ours, expected different names from"),
    (("--variants", "ddp,ddp"), "argument --variants: got ddp,ddp, expected different names from floor"),
    (("--rounds", "2"), "argument --rounds: got 2, expected a whole number of at least 3"),
    (("--model", "cnn"), "argument --model: got cnn, expected different names from gpt, gpt0"),
    (("step",), "argument step: `bench` measures nothing but windows: leave it out"),
    (("kernels",), "argument kernels: in a clone, `python benchmarks/bench_kernels.py pack accumulate`"),
    (("gpt",), "argument gpt: `bench` accepts only arguments that begin with --"),
    (("--device", "cuda"), "argument --device: got cuda, but torch finds no CUDA device"),
    (("--variants", "ddp,accelerate"), "argument --variants: got accelerate, but accelerate is not"),
    (("--out", "no/such.json"), "argument --out: cannot write no/such.json (No such file or directory)"),
]
# No machine has cores for 99999 workers.
CROWDS = [
    (name, arguments, "argument --workers: workers=99999: expected at most")
    for name, arguments in (
        ("train", ("--workers", "99999")),
        ("verify", ("--workers", "1,99999")),
        ("study", ("--workers", "1,99999")),
        ("bench", ("--variants", "ddp", "--workers", "99999")),
    )
]
BY_COMMAND = {
    "train": BAD_TRAIN,
    "verify": BAD_VERIFY,
    "plan": BAD_PLAN,
    "study": BAD_STUDY,
    "bench": BAD_BENCH,
}
BAD = CROWDS + [(name, *case) for name, cases in BY_COMMAND.items() for case in cases]


@pytest.mark.parametrize(
    ("name", "arguments", "message"), BAD, ids=lambda value: value if isinstance(value, str) else None
)
def test_bad_argument_is_named_with_what_is_needed(capsys, monkeypatch, name, arguments, message):
    monkeypatch.setattr("pyengine.cli.bench.arguments.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main([name, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_plan_takes_any_number_of_workers_since_it_starts_none(capsys):
    assert main(["plan", "--global-batch", "99999", "--workers", "99999", "--json"]) == 0
    assert '"workers": 99999' in capsys.readouterr().out


HELP = {
    "train": [
        "python -m pyengine train --model gpt --wire bf16",
        "engine    pe.GradSync",
        "ddp-hook  pe.attach",
        "ddp       plain DDP",
    ],
    "plan": [
        "256 on one device = 128 × 2 = 64 × 4 = 32 × 8",
        "pe.plan_batch(global_batch=256, micro_batch=8, world_size=4)",
    ],
    "study": ["default: 1,2,4,8", "default: 32,64,128,256", "study.watch(sync", "exit code"],
}


@pytest.mark.parametrize("command", HELP)
def test_help_shows_examples_and_defaults(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())  # independent of the terminal's width
    assert [words for words in HELP[command] if " ".join(words.split()) not in text] == []


def test_defaults_of_study_are_those_of_the_help():
    found = settings(build_parser().parse_args(["study"]))
    assert (found.workers, found.batches, found.repeats) == ((1, 2, 4, 8), (32, 64, 128, 256), 3)
    assert (found.subject, found.target, found.fixed) == ("cnn", BUILT_IN.format("cnn"), "global")


@pytest.mark.parametrize(("model", "task"), [("cnn", DigitsTask), ("gpt", TextTask)])
def test_largest_dataset_is_what_the_task_has(model, task):
    most = task().num_samples
    assert settings(build_parser().parse_args(["study", "--model", model, "--dataset-size", str(most)]))
    with pytest.raises(SystemExit):
        main(["study", "--model", model, "--dataset-size", str(most + 1)])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("bench", "--short"), "leave out --short: bench has"),
        (("bench", "step", "--short", "3"), "leave out --short 3: bench has"),
        (("plan", "--global-batch", "8", "-q"), "leave out -q: plan has"),
        (("doctor", "now"), "leave out now: doctor has"),
    ],
)
def test_an_unknown_argument_is_named_below_those_of_the_command(capsys, arguments, named):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: python -m pyengine {arguments[0]} [-h] [--json]")
    assert f"error: {named} only the arguments above" in printed


def test_an_unknown_argument_without_a_command_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--short"])
    assert "error: leave out --short, or put a command" in capsys.readouterr().err


def test_without_a_command_help_is_printed(capsys):
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("train", "rich"),
        ("train", "sklearn"),
        *(("study", name) for name in ("matplotlib", "jinja2", "psutil", "rich")),
    ],
)
def test_missing_extra_is_named_with_what_to_install(capsys, monkeypatch, command, module):
    folders = (f"pyengine.cli.{command}", "pyengine.cli.tasks")
    for name in [name for name in sys.modules if name.split(".")[0] == module or name.startswith(folders)]:
        monkeypatch.delitem(sys.modules, name)
    for folder in (command, "tasks"):
        monkeypatch.delattr(pyengine.cli, folder, raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    assert main([command]) == 1
    package = "scikit-learn" if module == "sklearn" else module
    assert capsys.readouterr().err == (
        f"{command} needs {package}, which is not installed: run pip install '.[{command}]' in a clone of "
        "pyengine\n"
    )
