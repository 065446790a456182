"""How a cell's batch is divided among workers, and cells that cannot be run."""

from __future__ import annotations

import pytest

from pyengine.cli.main import build_parser
from pyengine.cli.study.arguments import StudySettings, settings
from pyengine.cli.study.grid import Cell, Impossible, plan


def given(*arguments: str) -> StudySettings:
    return settings(build_parser().parse_args(["study", *arguments]))


CASES: list[tuple[tuple[str, ...], Cell, tuple[int, int, int]]] = [
    ((), Cell(1, 64), (64, 64, 1)),
    ((), Cell(4, 64), (64, 16, 1)),
    (("--micro-batch", "8"), Cell(1, 64), (64, 8, 8)),
    (("--micro-batch", "8"), Cell(4, 64), (64, 8, 2)),
    (("--micro-batch", "32"), Cell(4, 64), (64, 16, 1)),
    (("--fixed", "per-worker"), Cell(4, 64), (256, 64, 1)),
    (("--fixed", "per-worker", "--micro-batch", "16"), Cell(4, 64), (256, 16, 4)),
]


@pytest.mark.parametrize(("arguments", "cell", "shares"), CASES)
def test_batch_is_shared_out(arguments, cell, shares):
    found = plan(cell, given(*arguments))
    assert (found.global_batch, found.micro_batch, found.accumulate) == shares
    assert cell.workers * found.accumulate * found.micro_batch == found.global_batch


@pytest.mark.parametrize(
    ("cell", "steps"), [(Cell(1, 64), 64), (Cell(4, 64), 64), (Cell(1, 100), 41), (Cell(1, 1024), 12)]
)
def test_every_cell_sees_the_same_samples_and_takes_twelve_steps_at_least(cell, steps):
    assert plan(cell, given("--dataset-size", "1024", "--epochs", "4")).steps == steps


IMPOSSIBLE: list[tuple[tuple[str, ...], Cell, str]] = [
    ((), Cell(3, 64), "a global batch of 64 is not a multiple of 3 workers; nearest: 63 and 66"),
    ((), Cell(8, 4), "a global batch of 4 is not a multiple of 8 workers; nearest: 8"),
    (
        ("--micro-batch", "24"),
        Cell(2, 64),
        "global_batch=64 is not a multiple of micro_batch × world_size = 48; nearest are 48 and 96",
    ),
    (
        ("--fixed", "per-worker", "--dataset-size", "200"),
        Cell(4, 64),
        "a global batch of 256 exceeds the 200 training samples",
    ),
]


@pytest.mark.parametrize(("arguments", "cell", "reason"), IMPOSSIBLE)
def test_cell_that_does_not_come_out_even_has_a_reason(arguments, cell, reason):
    with pytest.raises(Impossible) as error:
        plan(cell, given(*arguments))
    assert str(error.value) == reason
