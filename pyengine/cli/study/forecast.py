"""How long the missing runs of a study take, from the runs that have ended."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from pyengine.cli.study.grid import WARM_UP_STEPS, Cell, Plan
from pyengine.cli.study.store import Record


class Forecast:
    """Expects that a cell lasts as long as before; other cells follow from the nearest one that has run.

    A step is assumed to last in proportion to a worker's samples and, beyond the cores, to the threads.

    Args:
        plans: by cell.
        threads: of each worker.
        cores: of the machine.
    """

    def __init__(self, plans: Mapping[Cell, Plan], *, threads: int, cores: int) -> None:
        self._plans, self._threads, self._cores = plans, threads, cores
        self._records: list[Record] = []

    def learn(self, record: Record) -> None:
        """Use a run, also a trial with fewer steps, for later forecasts."""
        if record.is_done:
            self._records.append(record)

    def seconds(self, cells: Iterable[Cell]) -> float | None:
        """Return the seconds of a run of each cell, one after the other; None before any run has ended."""
        return sum(map(self._run_s, cells)) if self._records else None

    def _run_s(self, cell: Cell) -> float:
        plan = self._plans[cell]
        same = [each.wall_s for each in self._records if (each.cell, each.steps) == (cell, plan.steps)]
        if same:
            return statistics.median(same)
        near = min(
            self._records, key=lambda each: (abs(each.workers - cell.workers), abs(each.batch - cell.batch))
        )
        samples = plan.worker_batch / (near.micro_batch * near.accumulate)
        step_s = statistics.median(near.seconds[WARM_UP_STEPS:])
        load = self._load(cell.workers) / self._load(near.workers)
        return near.wall_s - sum(near.seconds) + plan.steps * step_s * samples * load

    def _load(self, workers: int) -> float:
        return max(1.0, workers * self._threads / self._cores)
