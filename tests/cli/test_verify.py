"""`verify`: identical runs are reported as identical, and a fault with its position and cause."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest

from pyengine.cli.main import build_parser, main
from pyengine.cli.verify.arguments import EXAMPLES, settings
from pyengine.cli.verify.probe import Run, Trace
from pyengine.cli.verify.report import WorldSizeResult, sentences
from pyengine.cli.verify.run import Execute, on_workers, trace, verify


@dataclass
class Heard:
    """A report that records all calls."""

    runs: list[tuple[str, bool]] = field(default_factory=list)
    findings: dict[str, WorldSizeResult | None] = field(default_factory=dict)
    reference: Trace = field(default_factory=Trace)

    def begin(self, run: Run, *, still: int) -> None:
        pass

    def ran(self, subject: str, run: Run, trace: Trace, seconds: float, first: object) -> None:
        self.runs.append((run.label, first is None))

    def conclude(self, subject: str, finding: WorldSizeResult | None, reference: Trace) -> None:
        self.findings[subject], self.reference = finding, reference

    @property
    def finding(self) -> WorldSizeResult:
        """The finding of the only subject."""
        (finding,) = self.findings.values()
        assert finding is not None
        return finding


@pytest.fixture
def execute(ranks):
    """Return a function that makes runs on the session's ranks, without starting processes."""
    return lambda targets, run: ranks(run.workers).run(trace, targets, run)


@pytest.fixture
def checked(execute):
    """Return a function: `checked("--train", "subjects:right")` verifies, and returns the report."""
    return lambda *arguments: _verify(execute, arguments)


def _verify(execute: Execute, arguments: Sequence[str]) -> Heard:
    heard = Heard()
    identical = verify(settings(build_parser().parse_args(["verify", *arguments])), execute, heard)
    assert identical == all(finding is None for finding in heard.findings.values())
    return heard


@pytest.mark.parametrize("models", [("cnn",), pytest.param(("gpt", "cnn"), marks=pytest.mark.slow)])
def test_built_in_models_are_identical_with_exact_sums(checked, models):
    chosen = ["--model", *models] if len(models) == 1 else []
    heard = checked("--steps", "2", "--micro-batches", "6", *chosen)
    assert heard.findings == dict.fromkeys(models)
    labels = ["1 worker", "1 worker, again", "2 workers", "3 workers"]
    assert heard.runs == [(label, True) for label in labels for _ in models]


def test_built_in_model_with_plain_sums_is_not(checked):
    heard = checked("--model", "cnn", "--accumulator", "fp32", "--workers", "1,2", "--steps", "1")
    assert dict(heard.runs) == {
        "1 worker": True,
        "1 worker, again": True,
        "2 workers": False,
    }
    assert [name for name, _ in heard.finding.causes] == ["sums"]


def test_function_that_does_what_the_help_says_is_identical(checked):
    heard = checked("--train", "subjects:right")
    assert heard.findings == {"subjects:right": None}
    assert [label for label, _ in heard.runs] == ["1 worker", "1 worker, again", "2 workers", "3 workers"]
    assert heard.reference.steps == 4
    kinds = {kind for _, kind, _ in heard.reference.entries}
    assert kinds == {"window", "gradient", "norm", "parameter", "state"}


def test_example_of_the_help_runs(checked, tmp_path, monkeypatch):
    example = [line[2:] for line in EXAMPLES.splitlines() if line.startswith(("  import", "  def", "      "))]
    assert len(example) <= 25
    (tmp_path / "mine.py").write_text("\n".join(example))
    monkeypatch.syspath_prepend(tmp_path)
    heard = checked("--train", "mine:train", "--workers", "1,2")
    assert heard.findings == {"mine:train": None}
    assert heard.reference.steps == 4


@pytest.mark.slow
def test_a_model_is_identical_over_every_owner_of_its_gradients(checked):
    heard = checked("--wrap", "own,ddp,fsdp,hsdp", "--workers", "1,2", "--model", "gpt", "--steps", "2")
    assert heard.findings == {"gpt": None}


def test_a_function_that_wraps_its_model_by_itself_is_told_how_not_to(checked):
    with pytest.raises(RuntimeError, match="wraps its model itself: let it call"):
        checked("--wrap", "own,fsdp", "--workers", "1", "--train", "subjects:plain_sums")


# function, first step, kind and name, rank, causes
FAULTS = [
    ("plain_sums", 0, "gradient", None, 0, ["sums"]),
    ("dropout_by_rank", 0, "gradient", "0.weight", 0, ["randomness"]),
    ("batch_norm", 0, "buffer", "1.running_mean", 0, ["BatchNorm"]),
    ("optimizer_by_world", 0, "parameter", "0.weight", 0, ["optimizer"]),
    ("divided_by_world", 0, "gradient", "0.weight", 0, ["divisor"]),
    ("own_data", 0, "window", "window", 0, ["windows"]),
    ("unseeded", -1, "parameter", "0.weight", 0, ["seed"]),
    ("nondeterministic", 0, "gradient", "0.weight", 0, ["nondeterminism"]),
    ("plain_ddp", 0, "gradient", None, 0, ["sums"]),
]


QUICK = ("plain_sums", "dropout_by_rank", "divided_by_world", "unseeded")


@pytest.mark.parametrize(
    ("function", "step", "kind", "name", "rank", "causes"),
    [
        pytest.param(*fault, id=fault[0], marks=[] if fault[0] in QUICK else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_fault_is_found_with_its_cause(checked, function, step, kind, name, rank, causes):
    found = checked("--train", f"subjects:{function}", "--workers", "1,2", "--steps", "1").finding
    assert (found.first.step, found.first.kind, found.first.rank) == (step, kind, rank), sentences(
        "it", found, Trace()
    )
    assert name is None or found.first.name == name
    assert [cause for cause, _ in found.causes] == causes


def test_only_world_size_is_compared_with_its_own_rank_0(checked):
    found = checked("--train", "subjects:optimizer_by_rank", "--workers", "2", "--steps", "1").finding
    assert (found.reference, found.run, found.first.rank) == ("2 workers", "2 workers", 1)
    assert found.causes[0][0] == "optimizer"


def test_message_names_place_and_extent(checked):
    found = checked("--train", "subjects:optimizer_by_rank", "--workers", "1,2", "--steps", "1").finding
    text = "\n".join(sentences("it", found, Trace()))
    assert "it first differs from 1 worker at step 0, parameter 0.weight, on rank 1 of 2 workers." in text
    # AdamW's first step is lr times the sign of the gradient; with twice the lr, the difference is 1e-2.
    assert "Mismatched elements: 128 / 128" in text and "Greatest absolute difference: 0.0100" in text


@pytest.mark.parametrize(
    ("function", "message"),
    [("watches_nothing", "never called verify.watch"), ("steps_never", "took no optimizer step")],
)
def test_function_that_shows_nothing_is_an_error(checked, function, message):
    with pytest.raises(RuntimeError, match=message):
        checked("--train", f"subjects:{function}", "--workers", "1")


def test_command_prints_runs_and_verdict_and_says_it_by_its_exit_code(execute, capsys, monkeypatch):
    monkeypatch.setattr("pyengine.cli.verify.run.on_workers", execute)
    arguments = "--train", "subjects:nondeterministic", "--workers", "1", "--steps", "1"
    assert main(["verify", *arguments]) == 1
    assert "Likely cause (nondeterminism)" in capsys.readouterr().out
    assert main(["verify", *arguments, "--json"]) == 1
    *runs, verdict = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(run["event"], run["run"], run["identical"]) for run in runs] == [
        ("run", "1 worker", True),
        ("run", "1 worker, again", False),
    ]
    assert (verdict["event"], verdict["identical"]) == ("verdict", False)
    assert verdict["causes"][0]["name"] == "nondeterminism"
    assert main(["verify", *arguments[:1], "subjects:right", *arguments[2:]]) == 0


@pytest.mark.slow
def test_new_processes_record_what_the_session_s_ranks_do(execute):
    run = Run("", 1, steps=2, micro_batches=12, accumulator="exact", wrap="own", last=1)
    assert on_workers(["subjects:right"], run) == execute(["subjects:right"], run)


def test_run_that_fails_is_neither_identical_nor_different(capsys, monkeypatch):
    failed = mock.Mock(side_effect=RuntimeError("worker 0 of 1 failed: ValueError: boom"))
    monkeypatch.setattr("pyengine.cli.verify.run.on_workers", failed)
    assert main(["verify", "--train", "subjects:right", "--workers", "1"]) == 2
    assert "ValueError: boom" in capsys.readouterr().err
