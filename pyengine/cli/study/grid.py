"""The grid of a study, and the split of the batch in each cell."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyengine.cli.study.arguments import StudySettings
from pyengine.data.batch_plan import plan_batch

WARM_UP_STEPS = 3  # steps with allocations, lazy initialization, and the second window's new order of buckets
LEAST_STEPS = WARM_UP_STEPS + 9


@dataclass(frozen=True, order=True)
class Cell:
    """A number of workers and a batch size."""

    workers: int
    batch: int

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' if self.workers > 1 else ''} × batch {self.batch}"


@dataclass(frozen=True)
class Plan:
    """The batch split and the number of steps of a cell."""

    global_batch: int  # Samples per step, over all workers.
    micro_batch: int  # Samples per backward.
    accumulate: int  # Micro-batches per worker and step.
    steps: int  # Optimizer steps per run.


class Impossible(ValueError):
    """Raised for a cell that cannot be run, with the reason."""


def cells(settings: StudySettings) -> list[Cell]:
    """Return the cells of the grid, sorted by number of workers."""
    return [Cell(workers, batch) for workers in settings.workers for batch in settings.batches]


def plan(cell: Cell, settings: StudySettings) -> Plan:
    """Split the batch of a cell, and count its steps; all cells train on about the same number of samples."""
    share, rest = (cell.batch, 0) if settings.fixed == "per-worker" else divmod(cell.batch, cell.workers)
    if rest:
        nearest = f"{share * cell.workers} and {(share + 1) * cell.workers}" if share else f"{cell.workers}"
        raise Impossible(
            f"a global batch of {cell.batch} is not a multiple of {cell.workers} workers; nearest: {nearest}"
        )
    micro_batch = min(share, settings.micro_batch or share)
    global_batch = share * cell.workers
    try:
        split = plan_batch(global_batch=global_batch, micro_batch=micro_batch, world_size=cell.workers)
    except ValueError as error:
        raise Impossible(str(error)) from None
    if global_batch > settings.dataset_size:
        raise Impossible(
            f"a global batch of {global_batch} exceeds the {settings.dataset_size} training samples"
        )
    steps = max(LEAST_STEPS, math.ceil(settings.epochs * settings.dataset_size / global_batch))
    return Plan(global_batch, micro_batch, split.accumulate, steps)
