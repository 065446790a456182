"""`plan`: split a global batch over several numbers of workers, and scale the learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from rich.table import Table

from pyengine.cli import report
from pyengine.cli.plan import noise
from pyengine.cli.plan.arguments import Settings
from pyengine.cli.report import add_numbers
from pyengine.data.batch_plan import plan_batch, scale_lr


@dataclass(frozen=True)
class Row:
    """One global batch on one number of workers.

    Attributes:
        micro_batch: None if the global batch is not a multiple of the workers.
        accumulate: micro-batches a window, by rank; empty if the row cannot be run.
        idle: share of the window in which ranks with one micro-batch less wait, 0 to 1.
        lr_linear, lr_sqrt: learning rates of this global batch.
        steps_per_epoch: None without the size of the dataset, or if the row cannot be run.
        problem: why the row cannot be run; empty if it can.
    """

    global_batch: int
    workers: int
    micro_batch: int | None
    accumulate: tuple[int, ...]
    idle: float
    lr_linear: float
    lr_sqrt: float
    steps_per_epoch: int | None
    problem: str


def run(settings: Settings) -> int:
    if settings.run_file is not None:
        return noise.run(settings, settings.run_file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [
            _row(batch, workers, settings)
            for batch in settings.global_batches
            for workers in settings.workers
        ]
    cautions = list(dict.fromkeys(str(warning.message) for warning in caught))
    Report(as_json=settings.json).plan(rows, cautions, settings)
    return int(any(row.problem for row in rows))


def _row(global_batch: int, workers: int, settings: Settings) -> Row:
    plan, problem, micro_batch = None, "", settings.micro_batch
    split = partial(plan_batch, global_batch=global_batch, world_size=workers)
    try:
        micro_batch = micro_batch or split(micro_batch=1).accumulate
        plan = split(micro_batch=micro_batch, uneven=True)
    except ValueError as error:
        problem = str(error)
    size = settings.dataset_size
    lr = partial(scale_lr, settings.lr, from_batch=settings.from_batch, to_batch=global_batch)
    return Row(
        global_batch=global_batch,
        workers=workers,
        micro_batch=micro_batch,
        accumulate=plan.shares if plan else (),
        idle=plan.idle / (plan.idle + plan.micro_batches) if plan else 0.0,
        lr_linear=lr(rule="linear"),
        lr_sqrt=lr(rule="sqrt"),
        steps_per_epoch=plan.steps_per_epoch(size) if plan and size else None,
        problem=problem,
    )


class Report(report.Report):
    def plan(self, rows: Sequence[Row], cautions: Sequence[str], settings: Settings) -> None:
        """All rows are made; `cautions` are the warnings of making them."""
        caption = f"lr {settings.lr:g} at a global batch of {settings.from_batch}"
        if settings.dataset_size:
            caption += f"; steps an epoch of {settings.dataset_size} samples"
        table = Table(caption=caption, caption_justify="left")
        names = ["global\nbatch", "workers", "micro-\nbatch", "accumulate", "lr\nlinear", "lr\nsqrt"]
        add_numbers(table, [*names, "steps"] if settings.dataset_size else names)
        for before, row in zip([None, *rows], rows, strict=False):
            self._emit("plan", **asdict(row))
            if before and before.global_batch != row.global_batch:
                table.add_section()
            table.add_row(*_cells(row)[: len(table.columns)])
        for caution in cautions:
            self._emit("caution", text=caution)
        self._print(table, [*_sentences(rows), *cautions])


def _cells(row: Row) -> list[str]:
    few, many = min(row.accumulate, default=0), max(row.accumulate, default=0)
    accumulate = f"{few} or {many}" if few < many else f"{many or '-'}"
    lrs = f"{row.lr_linear:.4g}", f"{row.lr_sqrt:.4g}"
    steps = "-" if row.steps_per_epoch is None else str(row.steps_per_epoch)
    return [str(row.global_batch), str(row.workers), str(row.micro_batch or "-"), accumulate, *lrs, steps]


def _sentences(rows: Sequence[Row]) -> list[str]:
    """Return sentences on equal splits, uneven splits, and rows that cannot be run."""
    found = []
    for batch in dict.fromkeys(row.global_batch for row in rows):
        parts = [
            f"{batch // row.workers} × {row.workers}"
            for row in rows
            if row.global_batch == batch and row.accumulate and not row.idle
        ]
        if len(parts) > 1:
            found.append(f"{' = '.join(parts)}: samples a rank × ranks, the same step.")
    for row in rows:
        where = f"{row.global_batch} on {row.workers}"
        if row.problem:
            found.append(f"{where}: cannot be run. {row.problem}")
        elif row.idle:
            found.append(
                f"{where}: uneven, {100 * row.idle:.0f} % of the time is spent waiting. Use "
                "pe.WindowSampler, or GradSync(accumulate=plan.shares[rank]) with plan_batch(..., "
                "uneven=True)."
            )
    return found
