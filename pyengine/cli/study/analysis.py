"""From runs to figures: pure functions over records."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyengine.cli.study.grid import WARM_UP_STEPS, Cell
from pyengine.cli.study.store import Record

# A step is a stall if it is both: so many robust standard deviations above the median, and so many times the
# median.
STALL_SIGMAS = 10.0
STALL_RATIO = 3.0
_SIGMA = 1.4826  # median absolute deviation to standard deviation, for a normal distribution


@dataclass(frozen=True)
class Range:
    """A figure of a cell over its repeats: median, smallest and largest."""

    mid: float
    low: float
    high: float

    def over(self, divisor: float) -> Range:
        """Return it divided."""
        return Range(self.mid / divisor, self.low / divisor, self.high / divisor)

    def overlaps(self, other: Range) -> bool:
        """Return whether some value is in both."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Stall:
    """A step that took far longer than its neighbours."""

    record: Record
    step: int
    seconds: float
    usual_s: float


@dataclass(frozen=True)
class Curve:
    """Accuracy of one run over its time.

    Attributes:
        steps: taken before each accuracy.
        seconds: of training until then; evaluations left out, a stall counted as a usual step.
    """

    steps: list[int]
    seconds: list[float]
    accuracy: list[float]


@dataclass(frozen=True)
class Figures:
    """What the repeats of a cell measured; every Range over its runs that are done.

    Attributes:
        samples_s: samples a second; stalls and the first WARM_UP_STEPS steps left out.
        samples_s_with_stalls: the same with stalls.
        batches_s: optimizer steps a second, stalls left out.
        speed_up: throughput over that of one worker's cell; None if that cell has none.
        efficiency: speed-up over workers.
        sync_share: of a step, 0 to 1: waiting for, or working on, the reduction; mean over workers.
        memory_bytes: most that a worker held, largest worker.
        cpu_share: cores that a worker kept busy, mean over workers.
        accuracy: the best one of a run; None without accuracies.
        accuracy_s: seconds of training until then.
        goal_s: seconds of training until the goal; None if some run did not reach it, or there is none.
        is_oversubscribed: whether its workers' threads are more than the machine's cores.
        runs: how many there are.
    """

    cell: Cell
    samples_s: Range
    samples_s_with_stalls: Range
    batches_s: Range
    speed_up: Range | None
    efficiency: Range | None
    sync_share: Range
    memory_bytes: Range
    cpu_share: Range
    accuracy: Range | None
    accuracy_s: Range | None
    goal_s: Range | None
    worker_batch: int
    is_oversubscribed: bool
    runs: int


@dataclass(frozen=True)
class Recommendation:
    """The best configuration, if it is beyond noise.

    Attributes:
        best: None if another configuration is within noise of it, or nothing shows the noise.
        text: one sentence.
    """

    best: Cell | None
    text: str


@dataclass(frozen=True)
class Analysis:
    """Everything that tables, plots and the recommendation are made of.

    Attributes:
        fixed: "global" or "per-worker".
        cells: that were measured, in order.
        stalls: all of them.
        ended: runs that did not end well.
        curves: of each measured cell's runs, those without accuracies left out.
        goal: accuracy whose time is compared; None if nothing was evaluated.
        goal_from: the cell that sets it; None if the user did.
        cores: of the machine.
    """

    fixed: str
    cells: dict[Cell, Figures]
    stalls: list[Stall]
    ended: list[Record]
    curves: dict[Cell, list[Curve]]
    goal: float | None
    goal_from: Cell | None
    cores: int

    @property
    def workers(self) -> list[int]:
        """Worker counts that were measured."""
        return sorted({cell.workers for cell in self.cells})

    @property
    def batches(self) -> list[int]:
        """Batches that were measured."""
        return sorted({cell.batch for cell in self.cells})

    def row(self, batch: int) -> list[Figures]:
        """Return the cells of a batch, small worlds first."""
        return [figures for cell, figures in sorted(self.cells.items()) if cell.batch == batch]


def analyse(
    records: Iterable[Record], *, fixed: str, threads: int, cores: int, goal: float | None
) -> Analysis:
    """Turn records into figures.

    Args:
        records: of one study, in any order.
        fixed: "global" or "per-worker".
        threads: of each worker.
        cores: of the machine.
        goal: accuracy to compare times at; None: the best one that every run reaches.
    """
    records = sorted(records, key=lambda record: record.key)
    done: dict[Cell, list[Record]] = {}
    for record in records:
        if record.is_done:
            done.setdefault(record.cell, []).append(record)
    curves = {cell: [curve(record) for record in runs if _points(record)] for cell, runs in done.items()}
    goal_from = None
    if goal is None:
        goal, goal_from = _common_goal(curves)
    cells = {
        cell: _figures(cell, runs, done, goal, threads * cell.workers > cores) for cell, runs in done.items()
    }
    return Analysis(
        fixed=fixed,
        cells=cells,
        stalls=[stall for runs in done.values() for record in runs for stall in stalls(record)],
        ended=[record for record in records if not record.is_done],
        curves={cell: some for cell, some in curves.items() if some},
        goal=goal,
        goal_from=goal_from,
        cores=cores,
    )


def recommend(analysis: Analysis) -> Recommendation:
    """Recommend the best configuration if its range overlaps no other configuration's range.

    The best one has the smallest time to the goal or, where no configuration reached a goal in every run, the
    highest throughput. A range reaches from the smallest to the largest repeat.
    """
    cells = analysis.cells.values()
    if not cells:
        return Recommendation(None, "Nothing was measured: the report has the reasons.")
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
    """Return the steps after the warm-up that are far above the others.

    Far is both: more than STALL_SIGMAS robust standard deviations (1.4826 × median absolute deviation) above
    the median, and more than STALL_RATIO medians. The ratio keeps runs quiet whose steps hardly vary.
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
    """Return a run's accuracy over its time."""
    usual = {stall.step: stall.usual_s for stall in stalls(record)}
    each = (usual.get(step, seconds) for step, seconds in enumerate(record.seconds))
    clock = list(itertools.accumulate(each, initial=0.0))
    points = _points(record)
    return Curve(
        [step for step, _ in points], [clock[step] for step, _ in points], [value for _, value in points]
    )


def time_to(curve: Curve, goal: float) -> float | None:
    """Return the seconds until an accuracy was first measured at the goal or above; None if it never was."""
    return next((at for at, got in zip(curve.seconds, curve.accuracy, strict=True) if got >= goal), None)


def _points(record: Record) -> list[tuple[int, float]]:
    return [(step, value) for step, value in record.accuracy if value is not None]


def _common_goal(curves: dict[Cell, list[Curve]]) -> tuple[float | None, Cell | None]:
    best = [(max(one.accuracy), cell) for cell, some in curves.items() for one in some]
    return min(best) if best else (None, None)


def _figures(
    cell: Cell,
    runs: Sequence[Record],
    done: dict[Cell, list[Record]],
    goal: float | None,
    oversubscribed: bool,
) -> Figures:
    samples_s = _range(runs, throughput)
    single = done.get(Cell(1, cell.batch))
    base = _range(single, throughput).mid if single else None
    speed_up = samples_s.over(base) if base else None
    some = [curve(record) for record in runs if _points(record)]
    best = [max(zip(one.accuracy, [-at for at in one.seconds], strict=True)) for one in some]
    times = [time_to(one, goal) for one in some] if goal is not None else []
    is_reached = len(times) == len(runs) and None not in times
    return Figures(
        cell=cell,
        samples_s=samples_s,
        samples_s_with_stalls=_range(runs, lambda record: _rate(record, _measured(record))),
        batches_s=_range(runs, lambda record: throughput(record) / record.global_batch),
        speed_up=speed_up,
        efficiency=speed_up.over(cell.workers) if speed_up else None,
        sync_share=_range(runs, sync_share),
        memory_bytes=_range(runs, lambda record: float(max(record.peak_rss_bytes))),
        cpu_share=_range(runs, lambda record: statistics.fmean(record.cpu_share)),
        accuracy=_of([accuracy for accuracy, _ in best]),
        accuracy_s=_of([-at for _, at in best]),
        goal_s=_of([at for at in times if at is not None]) if is_reached else None,
        worker_batch=runs[0].micro_batch * runs[0].accumulate,
        is_oversubscribed=oversubscribed,
        runs=len(runs),
    )


def throughput(record: Record) -> float:
    """Return samples a second; warm-up and stalls left out."""
    return _rate(record, _kept(record))


def sync_share(record: Record) -> float:
    """Return the share of the steps in which workers only waited for, or worked on, the reduction."""
    kept = _kept(record)
    return sum(record.sync_s[step] for step in kept) / sum(record.seconds[step] for step in kept)


def _rate(record: Record, steps: Sequence[int]) -> float:
    return record.global_batch * len(steps) / sum(record.seconds[step] for step in steps)


def _measured(record: Record) -> list[int]:
    return list(range(WARM_UP_STEPS, len(record.seconds)))


def _kept(record: Record) -> list[int]:
    stalled = {stall.step for stall in stalls(record)}
    return [step for step in _measured(record) if step not in stalled]


def _range(runs: Sequence[Record], figure: Callable[[Record], float]) -> Range:
    values = [figure(record) for record in runs]
    return Range(statistics.median(values), min(values), max(values))


def _of(values: Sequence[float]) -> Range | None:
    return Range(statistics.median(values), min(values), max(values)) if values else None


def percent(share: float) -> str:
    """Return a share in percent, with a space that does not break."""
    return f"{100 * share:.1f}\u00a0%" if share < 1 else f"{100 * share:.0f}\u00a0%"


def duration(value: float) -> str:
    """Return seconds with a unit that suits them."""
    if value >= 60:
        return f"{value / 60:.1f}\u00a0min"
    return f"{value:.2f}\u00a0s" if value >= 1 else f"{1e3 * value:.3g}\u00a0ms"


def _samples_s(value: float) -> str:
    return f"{value:,.0f}\u00a0samples/s"


def _with_range(figure: Range, text_of: Callable[[float], str]) -> str:
    if figure.low == figure.high:
        return text_of(figure.mid)
    return f"{text_of(figure.mid)}, {text_of(figure.low)} to {text_of(figure.high)}"
