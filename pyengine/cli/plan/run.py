"""`plan`: split a global batch over several numbers of workers, and scale the learning rate.

With `--from`, estimate the cost of other global batches from the gradient noise scale of a run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from pyengine.cli import report
from pyengine.cli.arguments import Conflict
from pyengine.cli.plan.arguments import PlanSettings
from pyengine.cli.report import add_numbers
from pyengine.cli.terminal import read_json
from pyengine.data.batch_plan import plan_batch, scale_lr

_NEED = "expected a file that pe.telemetry.JsonLines wrote in a run with sync.measure(pe.NoiseScale())"
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
_SURE = 1 / 3  # largest ratio of spread to scale at which a noise scale counts as known


@dataclass(frozen=True)
class Row:
    """The split of a global batch over a number of workers."""

    global_batch: int
    workers: int
    micro_batch: int | None  # None if the global batch cannot be divided equally.
    accumulate: tuple[int, ...]  # Micro-batches per window, by rank; empty if the row cannot be run.
    idle: float  # Share of all ranks' time that ranks with one micro-batch fewer spend waiting, 0 to 1.
    lr_linear: float  # Learning rate for this global batch by the linear rule.
    lr_sqrt: float  # Learning rate for this global batch by the square-root rule.
    steps_per_epoch: int | None  # None without a dataset size, or if the row cannot be run.
    problem: str  # Why the row cannot be run; empty if it can.


def run(settings: PlanSettings) -> int:
    if settings.run_file is not None:
        return _plan_from(settings, settings.run_file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [
            _row(batch, workers, settings)
            for batch in settings.global_batches
            for workers in settings.workers
        ]
    cautions = list(dict.fromkeys(str(warning.message) for warning in caught))
    PlanReport(as_json=settings.json).plan(rows, cautions, settings)
    return int(any(row.problem for row in rows))


def _row(global_batch: int, workers: int, settings: PlanSettings) -> Row:
    plan, problem, micro_batch = None, "", settings.micro_batch
    share, rest = divmod(global_batch, workers)
    if micro_batch is None and rest:
        near = f"{share * workers} or {(share + 1) * workers}" if share else f"{workers}"
        problem = (
            f"{global_batch} samples cannot be divided equally among {workers} workers: use a batch of "
            f"{near}, or set --micro-batch, so that workers may run unequal numbers of micro-batches"
        )
    else:
        micro_batch = micro_batch or share
        try:
            plan = plan_batch(
                global_batch=global_batch, micro_batch=micro_batch, world_size=workers, uneven=True
            )
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


class PlanReport(report.Report):
    def plan(self, rows: Sequence[Row], cautions: Sequence[str], settings: PlanSettings) -> None:
        """Report all rows; `cautions` are the warnings issued while planning them."""
        caption = f"lr {settings.lr:g} at a global batch of {settings.from_batch}"
        if settings.dataset_size:
            caption += f"; steps per epoch of {settings.dataset_size} samples"
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

    def noise(self, noise: Noise, rows: Sequence[dict[str, float]]) -> None:
        """Report the noise scale of a run; `rows` describe other global batches."""
        self._emit("noise", **asdict(noise), is_sure=noise.is_sure)
        caption = f"steps and samples to the same loss, relative to a batch of {noise.batch:,.0f}"
        table = Table(caption=caption, caption_justify="left")
        names = ["global\nbatch", "steps", "its spread", "samples", "lr\nnoise", "lr\nlinear", "lr\nsqrt"]
        add_numbers(table, names)
        for each in rows:
            self._emit("batch", **each)
            lrs = (f"{each[name]:.4g}" for name in ("lr_noise", "lr_linear", "lr_sqrt"))
            times, more = f"{each['steps']:.2f} ×", f"{each['samples']:.2f} ×"
            spread = f"{each['steps_low']:.2f}–{each['steps_high']:.2f}"
            table.add_row(f"{each['global_batch']:,.0f}", times, spread, more, *lrs)
        self._print(table, _suggestions(noise))


def _cells(row: Row) -> list[str]:
    few, many = min(row.accumulate, default=0), max(row.accumulate, default=0)
    accumulate = f"{few} or {many}" if few < many else f"{many or '-'}"
    lrs = f"{row.lr_linear:.4g}", f"{row.lr_sqrt:.4g}"
    steps = "-" if row.steps_per_epoch is None else str(row.steps_per_epoch)
    return [str(row.global_batch), str(row.workers), str(row.micro_batch or "-"), accumulate, *lrs, steps]


def _sentences(rows: Sequence[Row]) -> list[str]:
    """Return sentences about equal splits, uneven splits, and rows that cannot be run."""
    found = []
    for batch in dict.fromkeys(row.global_batch for row in rows):
        parts = [
            f"{batch // row.workers} × {row.workers}"
            for row in rows
            if row.global_batch == batch and row.accumulate and not row.idle
        ]
        if len(parts) > 1:
            found.append(f"{' = '.join(parts)} (samples per rank × ranks): the same step.")
    for row in rows:
        where = f"{row.global_batch} on {row.workers}"
        if row.problem:
            found.append(f"{where}: cannot be run. {row.problem}")
        elif row.idle:
            found.append(
                f"{where}: uneven; {100 * row.idle:.0f} % of the time is spent waiting. Use "
                "pe.WindowSampler, or GradSync(accumulate=plan.shares[rank]) with plan_batch(..., "
                "uneven=True)."
            )
    return found


# ---- plans from a measured noise scale ----


@dataclass(frozen=True)
class Noise:
    """The gradient noise scale that a run has measured."""

    scale: float  # B_noise, in samples.
    spread: float | None  # Standard error of the scale; None after one window.
    windows: int  # Number of windows in the average.
    batch: float  # Median number of samples per window of the run.

    def steps(self, batch: float, scale: float | None = None) -> float:
        """Return the ratio of steps to the fewest possible steps: S / S_min = 1 + B_noise / B."""
        return 1 + (self.scale if scale is None else scale) / batch

    def samples(self, batch: float) -> float:
        """Return the ratio of samples to the fewest possible samples: E / E_min = 1 + B / B_noise."""
        return 1 + batch / self.scale

    @property
    def low(self) -> float:
        return max(0.0, self.scale - (self.spread or 0.0))

    @property
    def high(self) -> float:
        return self.scale + (self.spread or 0.0)

    @property
    def is_sure(self) -> bool:
        return self.spread is not None and self.spread <= _SURE * self.scale


def _plan_from(settings: PlanSettings, path: Path) -> int:
    noise = _read(path)
    batches: Sequence[float] = settings.global_batches or tuple(noise.batch * factor for factor in _FACTORS)
    rows = [_other_batch(noise, batch, settings.lr, settings.from_batch or noise.batch) for batch in batches]
    PlanReport(as_json=settings.json).noise(noise, rows)
    return 0


def _read(path: Path) -> Noise:
    """Return the last noise scale estimate in a file of step records.

    Raises:
        Conflict: the file cannot be read, or has no estimate above 0.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Conflict(f"argument --from: {path} cannot be read ({error}): {_NEED}") from None
    steps = [step for step in map(_fields, text.splitlines()) if isinstance(step.get("noise_scale"), dict)]
    if not steps:
        raise Conflict(f"argument --from: no line of {path} has a noise_scale: {_NEED}")
    last = steps[-1]["noise_scale"]
    if last.get("scale", 0) is None:
        raise Conflict(
            f"argument --from: {path} has no noise scale after {last.get('windows')} windows: their mean "
            "gradient cannot be distinguished from 0; continue training, or use larger windows"
        )
    try:
        spread = None if last["spread"] is None else float(last["spread"])
        batch = median(float(step["count"]) for step in steps)
        noise = Noise(float(last["scale"]), spread, int(last["windows"]), batch)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Conflict(f"argument --from: a noise_scale in {path} is damaged ({error!r}): {_NEED}") from None
    if spread is not None and not 0 <= spread < math.inf:
        raise Conflict(f"argument --from: {path} has a noise scale with a spread of {spread:g}: {_NEED}")
    if not (0 < noise.scale < math.inf and 0 < noise.batch < math.inf):
        raise Conflict(
            f"argument --from: {path} has a noise scale of {noise.scale:g} at a batch size of "
            f"{noise.batch:g}; expected both to be finite and above 0. Make sure that every rank draws "
            "different samples"
        )
    return noise


def _fields(line: str) -> dict[str, Any]:
    """Return the JSON object on a line; an empty dict for a line that a crash has truncated."""
    try:
        found = read_json(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _other_batch(noise: Noise, batch: float, lr: float, from_batch: float) -> dict[str, float]:
    """Return the cost of a global batch: `steps` and `samples` for the same loss, relative to the run."""
    steps = [noise.steps(batch, scale) / noise.steps(noise.batch, scale) for scale in (noise.low, noise.high)]
    return {
        "global_batch": batch,
        "steps": noise.steps(batch) / noise.steps(noise.batch),
        # The number of steps if the true noise scale is smaller or larger by the spread.
        "steps_low": min(steps),
        "steps_high": max(steps),
        "samples": noise.samples(batch) / noise.samples(noise.batch),
        # The learning rate is the largest useful learning rate divided by 1 + B_noise / B.
        "lr_noise": lr * noise.steps(from_batch) / noise.steps(batch),
        "lr_linear": lr * batch / from_batch,
        "lr_sqrt": lr * (batch / from_batch) ** 0.5,
    }


def _suggestions(noise: Noise) -> list[str]:
    """Return suggestions for the batch size, and describe how certain they are."""
    spread = "" if noise.spread is None else f" ± {noise.spread:,.0f}"
    found = [
        (
            f"Noise scale: {noise.scale:,.0f}{spread} samples, in the unit of `count`, over {noise.windows} "
            f"windows. A batch of that size takes 2 × the fewest possible steps and 2 × the fewest possible "
            f"samples. This run's batch of {noise.batch:,.0f} takes {noise.steps(noise.batch):.2f} × the "
            f"fewest steps and {noise.samples(noise.batch):.2f} × the fewest samples."
        )
    ]
    if not noise.is_sure:
        found.append(
            "This estimate is uncertain: its spread is unknown or more than a third of the scale. Continue "
            "training, or use more ranks or micro-batches."
        )
    elif noise.batch < noise.low:
        found.append(
            f"A larger batch pays off, up to about {noise.scale:,.0f}: it needs fewer steps, and "
            "at most twice the samples."
        )
    elif noise.batch > noise.high:
        found.append(
            f"A smaller batch pays off, down to about {noise.scale:,.0f}: it needs fewer samples, and "
            "at most twice the steps."
        )
    else:
        found.append("The batch size is right, within the spread.")
    found.append("The noise scale grows as the loss falls: measure again later.")
    return found
