"""The examples run as their first lines say, and fit on a screen."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import forked
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MAX_LINES = 60
RUN = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def _command(script: str) -> list[str]:
    """Return the command in the first line of an example, after the colon."""
    doc = ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))
    assert doc is not None
    program, *arguments = doc.splitlines()[0].rpartition(": ")[2].split()
    return [*RUN[program], *arguments]


def _run(script: str, *launcher: str) -> str:
    command = [*launcher, f"examples/{script}"] if launcher else _command(script)
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_forked(script: str) -> str:
    """Run an example as `python` would, but fork workers, because importing torch again takes seconds."""
    done = forked.python(str(EXAMPLES / script), cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_has_at_most_sixty_lines_and_says_how_it_is_run(script):
    assert len(script.read_text().splitlines()) <= MAX_LINES
    assert _command(script.name)[-1] == f"examples/{script.name}"


def test_the_page_of_the_examples_says_how_each_is_run():
    page = (EXAMPLES / "README.md").read_text()
    commands = [ast.get_docstring(ast.parse(script.read_text())).splitlines()[0] for script in SCRIPTS]
    assert [command for command in commands if f"| `{command.rpartition(': ')[2]}` |" not in page] == []


@pytest.mark.slow
def test_launch_starts_the_workers_of_an_example():
    assert "6 optimizer steps for 22 micro-batches" in _run("wrap_unnested.py")


@pytest.mark.slow
def test_torchrun_starts_the_workers_of_an_example():
    assert "in 20 steps" in _run("attach.py")


@pytest.mark.slow
def test_one_script_prints_the_same_however_its_workers_are_started():
    by_itself = _run_forked("any_launcher.py")
    assert by_itself.count("\n") == 1
    assert _run("any_launcher.py", *RUN["torchrun"], "--nproc-per-node", "2") == by_itself


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_ends_with_the_same_bits_on_fewer():
    said = _run_forked("exact_elastic.py").splitlines()
    assert said == ["worker 1 of 3 failed (exit code -9)", "the same bits"]


@pytest.mark.slow
def test_a_bad_batch_is_skipped_and_norms_and_noise_scale_are_plotted():
    pytest.importorskip("matplotlib")
    reason, path = _run_forked("gradient_norms.py").splitlines()
    assert reason.startswith("skipped by SpikePolicy(factor=5, window=20, action='skip')")
    assert Path(path).stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_goes_on_from_its_last_checkpoint():
    said = _run_forked("checkpoints.py").splitlines()
    assert said == ["worker 1 of 2 failed (exit code -9)", "went on behind step 4", "the same bits"]


@pytest.mark.slow
def test_a_run_saved_in_the_middle_of_an_epoch_ends_with_the_same_bits():
    pytest.importorskip("torchdata")
    assert _run_forked("stateful_loader.py") == "the same bits\n"
