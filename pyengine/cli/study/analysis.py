"""Compute the figures of a study from the records of its runs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyengine.cli.noise import Range, duration, percent
from pyengine.cli.study.grid import WARM_UP_STEPS, Cell
from pyengine.cli.study.store import Record

# A stall is a step whose time exceeds the median by more than `STALL_SIGMAS` robust standard deviations, and
# is more than `STALL_RATIO` times the median.
STALL_SIGMAS = 10.0
STALL_RATIO = 3.0
_SIGMA = 1.4826  # ratio of a normal distribution's standard deviation to its median absolute deviation


@dataclass(frozen=True)
class Stall:
    """A step that took far longer than the other steps of its run."""

    record: Record
    step: int
    seconds: float
    usual_s: float


@dataclass(frozen=True)
class Curve:
    """The accuracy of one run over its training time."""

    steps: list[int]  # Optimizer steps before each evaluation.
    # Training time until each evaluation, without the time of evaluations. For a stalled step, the median
    # step time is used.
    seconds: list[float]
    accuracy: list[float]


@dataclass(frozen=True)
class Figures:
    """The results of a cell (workers and batch size); each `Range` is over its successful runs."""

    cell: Cell
    samples_s: Range  # Samples per second, without stalls and the first WARM_UP_STEPS steps.
    batches_s: Range  # Optimizer steps per second, without stalls.
    speed_up: Range | None  # Ratio to the throughput of one worker; None if that was not measured.
    # Whether the throughput range overlaps with the range of one worker, or either cell has only one run.
    is_within_noise: bool
    efficiency: Range | None  # Speed-up divided by the number of workers.
    # The share of a step in which a worker waits for or computes the reduction, 0 to 1; mean over workers.
    sync_share: Range
    stalls: Range  # Number of stalled steps in a run.
    memory_bytes: Range  # Peak memory of the worker with the largest peak.
    cpu_share: Range  # Busy cores per worker, mean over workers.
    accuracy: Range | None  # Best accuracy of a run; None without evaluations.
    goal_s: Range | None  # Training seconds until the goal; None without a goal, or if a run missed it.
    noise_scale: Range | None  # Noise scale in samples, at the end of a run; None if any run has no estimate.
    noise_spread: float | None  # Median standard error of the runs' noise scales.
    worker_batch: int  # Samples per worker and step.
    is_oversubscribed: bool  # Whether the workers have more threads than the machine has cores.
    runs: int  # Number of runs.

    @property
    def global_batch(self) -> int:
        return self.worker_batch * self.cell.workers


@dataclass(frozen=True)
class Recommendation:
    """The best cell and a sentence about it; no cell if the noise is unknown or too large to decide."""

    best: Cell | None
    text: str


@dataclass(frozen=True)
class Analysis:
    """The data for tables, plots and the recommendation."""

    fixed: str  # "global" or "per-worker".
    cells: dict[Cell, Figures]  # Measured cells, in order.
    stalls: list[Stall]
    ended: list[Record]  # Runs that did not succeed.
    curves: dict[Cell, list[Curve]]  # Curves of the runs with accuracies.
    goal: float | None  # Accuracy at which times are compared; None without evaluations.
    goal_from: Cell | None  # The cell that determines the goal; None if the user gives the goal.
    cores: int  # Cores of the machine.

    @property
    def workers(self) -> list[int]:
        return sorted({cell.workers for cell in self.cells})

    @property
    def batches(self) -> list[int]:
        return sorted({cell.batch for cell in self.cells})

    def row(self, batch: int) -> list[Figures]:
        """Return the figures of a batch size, sorted by number of workers."""
        return [figures for cell, figures in sorted(self.cells.items()) if cell.batch == batch]


def analyse(
    records: Iterable[Record], *, fixed: str, threads: int, cores: int, goal: float | None
) -> Analysis:
    """Compute the figures of a study.

    Args:
        records: the records of one study, in any order.
        fixed: "global" or "per-worker".
        threads: number of threads of each worker.
        cores: number of cores of the machine.
        goal: accuracy at which times are compared; None for the best accuracy that every run reaches.
    """
    records = sorted(records, key=lambda record: record.key)
    done: dict[Cell, list[Record]] = {}
    for record in records:
        if record.is_done:
            done.setdefault(record.cell, []).append(record)
    curves = {cell: [curve(record) for record in runs if _points(record)] for cell, runs in done.items()}
    goal_from = None
    if goal is None and any(curves.values()):
        goal, goal_from = min((max(one.accuracy), cell) for cell, some in curves.items() for one in some)

    def figures(cell: Cell, runs: Sequence[Record]) -> Figures:
        single = done.get(Cell(1, cell.batch), [])
        samples_s = Range.of(map(throughput, runs))
        base = Range.of(map(throughput, single)) if single else None
        speed_up = samples_s.over(base.mid) if base else None
        is_known = min(len(runs), len(single)) > 1
        times = [time_to(one, goal) for one in curves[cell]] if goal is not None else []
        reached = [at for at in times if at is not None]
        scales = [record.noise_scale for record in runs if record.noise_scale is not None]
        spreads = [record.noise_spread for record in runs if record.noise_spread is not None]
        has_scale = len(scales) == len(runs)
        is_noise = cell.workers > 1 and base is not None and (samples_s.overlaps(base) or not is_known)
        return Figures(
            cell=cell,
            samples_s=samples_s,
            batches_s=Range.of(throughput(record) / record.global_batch for record in runs),
            speed_up=speed_up,
            is_within_noise=is_noise,
            efficiency=speed_up.over(cell.workers) if speed_up else None,
            sync_share=Range.of(map(sync_share, runs)),
            stalls=Range.of(len(stalls(record)) for record in runs),
            memory_bytes=Range.of(float(max(record.peak_rss_bytes)) for record in runs),
            cpu_share=Range.of(statistics.fmean(record.cpu_share) for record in runs),
            accuracy=Range.of(max(one.accuracy) for one in curves[cell]) if curves[cell] else None,
            goal_s=Range.of(reached) if len(reached) == len(runs) else None,
            noise_scale=Range.of(scales) if has_scale else None,
            noise_spread=statistics.median(spreads) if has_scale and spreads else None,
            worker_batch=runs[0].micro_batch * runs[0].accumulate,
            is_oversubscribed=threads * cell.workers > cores,
            runs=len(runs),
        )

    return Analysis(
        fixed=fixed,
        cells={cell: figures(cell, runs) for cell, runs in done.items()},
        stalls=[stall for runs in done.values() for record in runs for stall in stalls(record)],
        ended=[record for record in records if not record.is_done],
        curves={cell: some for cell, some in curves.items() if some},
        goal=goal,
        goal_from=goal_from,
        cores=cores,
    )


def recommend(analysis: Analysis) -> Recommendation:
    """Recommend the best configuration if its range overlaps with no other range.

    The best configuration has the shortest time to the goal or, if no configuration reached the goal in every
    run, the highest throughput. A range extends from the smallest to the largest value of the repeats.
    """
    cells = analysis.cells.values()
    if not cells:
        return Recommendation(None, "Nothing was measured: the report gives the reasons.")
    timed = [(figures, figures.goal_s) for figures in cells if figures.goal_s is not None]
    if analysis.goal is not None and timed:
        ranked = sorted(timed, key=lambda pair: pair[1].mid)
        measure, text_of = f"time to {percent(analysis.goal)}", duration
    else:
        ranked = sorted(((each, each.samples_s) for each in cells), key=lambda pair: -pair[1].mid)
        measure, text_of = "throughput", _samples_s
    texts = [f"{figures.cell} ({_with_range(value, text_of)})" for figures, value in ranked]
    if any(figures.runs < 2 for figures, _ in ranked[:2]):
        text = (
            f"{texts[0]} has the best {measure}, but a single run does not show the noise: raise --repeats."
        )
        return Recommendation(None, text)
    best, best_value = ranked[0]
    rivals = [
        text for text, (_, value) in zip(texts[1:], ranked[1:], strict=True) if value.overlaps(best_value)
    ]
    if rivals:
        return Recommendation(
            None, f"Within noise of each other in {measure}: {', '.join([texts[0], *rivals])}."
        )
    second = f"; the next one is {texts[1]}" if len(texts) > 1 else ""
    return Recommendation(best.cell, f"{texts[0]} has the best {measure}{second}.")


def stalls(record: Record) -> list[Stall]:
    """Return the steps after the warm-up that took far longer than the other steps.

    A stall is a step whose time exceeds the median by more than `STALL_SIGMAS` robust standard deviations
    (1.4826 × median absolute deviation), and is more than `STALL_RATIO` × the median, so that runs with
    steady steps have no stalls.
    """
    measured = record.seconds[WARM_UP_STEPS:]
    usual_s = statistics.median(measured)
    spread = _SIGMA * statistics.median(abs(seconds - usual_s) for seconds in measured)
    limit = max(usual_s + STALL_SIGMAS * spread, STALL_RATIO * usual_s)
    return [
        Stall(record, step, seconds, usual_s)
        for step, seconds in enumerate(measured, start=WARM_UP_STEPS)
        if seconds > limit
    ]


def curve(record: Record) -> Curve:
    usual = {stall.step: stall.usual_s for stall in stalls(record)}
    each = (usual.get(step, seconds) for step, seconds in enumerate(record.seconds))
    clock = list(itertools.accumulate(each, initial=0.0))
    points = _points(record)
    return Curve(
        [step for step, _ in points], [clock[step] for step, _ in points], [value for _, value in points]
    )


def time_to(curve: Curve, goal: float) -> float | None:
    """Return the seconds until the first accuracy of at least the goal; None if the goal is not reached."""
    return next((at for at, got in zip(curve.seconds, curve.accuracy, strict=True) if got >= goal), None)


def _points(record: Record) -> list[tuple[int, float]]:
    return [(step, value) for step, value in record.accuracy if value is not None]


def throughput(record: Record) -> float:
    """Return the samples per second, without warm-up and stalls."""
    kept = _kept(record)
    return record.global_batch * len(kept) / sum(record.seconds[step] for step in kept)


def sync_share(record: Record) -> float:
    """Return the share of step time in which workers only waited for or computed the reduction."""
    kept = _kept(record)
    return sum(record.sync_s[step] for step in kept) / sum(record.seconds[step] for step in kept)


def _kept(record: Record) -> list[int]:
    stalled = {stall.step for stall in stalls(record)}
    return [step for step in range(WARM_UP_STEPS, len(record.seconds)) if step not in stalled]


def _samples_s(value: float) -> str:
    return f"{value:,.0f}\u00a0samples/s"


def _with_range(figure: Range, text_of: Callable[[float], str]) -> str:
    if figure.low == figure.high:
        return text_of(figure.mid)
    return f"{text_of(figure.mid)}, {text_of(figure.low)} to {text_of(figure.high)}"
