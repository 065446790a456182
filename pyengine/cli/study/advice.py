"""What a study says, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyengine.cli.study.analysis import Analysis, Figures, Range, Stall
from pyengine.cli.study.grid import Cell
from pyengine.cli.study.store import Record

# A worker's share of the batch is called too small where, with a core for every worker, more than this of a
# step goes to waiting for gradients, or less than this is left of each worker's speed.
_SYNC_SHARE = 0.3
_EFFICIENCY = 0.5
_BUSY = 0.1  # of the machine, used by others
_FURTHER = (2, 4)  # times as many workers as were measured


@dataclass(frozen=True)
class Advice:
    """One thing to know."""

    title: str
    text: str


def advise(analysis: Analysis, records: Sequence[Record], impossible: dict[Cell, str]) -> list[Advice]:
    """Return what follows from a study, the most useful first.

    Args:
        records: that the analysis was made of.
        impossible: cells that were not run, and why.
    """
    if not analysis.cells:
        return [Advice("Nothing was measured", "No run ended well: the report has the reasons.")]
    found = [_fastest(analysis), _most_accurate(analysis), _too_small(analysis), _prediction(analysis)]
    found += [_oversubscribed(analysis), _stalled(analysis), _missing(analysis, impossible), _busy(records)]
    return [advice for advice in found if advice is not None]


def _fastest(analysis: Analysis) -> Advice:
    cells = analysis.cells.values()
    reached = [(figures, figures.goal_s) for figures in cells if figures.goal_s is not None]
    if analysis.goal is None or not reached:
        best = max(cells, key=lambda figures: figures.samples_s.mid)
        why = (
            "no accuracy was taken"
            if analysis.goal is None
            else f"no cell reached {percent(analysis.goal)} in every run"
        )
        text = (
            f"{best.cell}{_shared(best)}: {best.samples_s.mid:,.0f} samples/s. There is no time to an "
            f"accuracy: {why}."
        )
        return Advice("Highest throughput", text)
    best, least = min(reached, key=lambda pair: pair[1].mid)
    slowest, most = max(reached, key=lambda pair: pair[1].mid)
    text = f"{best.cell}{_shared(best)} reaches {percent(analysis.goal)} in {seconds(least)}"
    if slowest is not best:
        text += f"; the slowest, {slowest.cell}, in {seconds(most)}"
    late = len(analysis.cells) - len(reached)
    if late:
        text += f". {late} of {len(analysis.cells)} cells did not reach it in every run"
    return Advice("Smallest time", text + ".")


def _most_accurate(analysis: Analysis) -> Advice | None:
    judged = [
        (figures, figures.accuracy, figures.accuracy_s)
        for figures in analysis.cells.values()
        if figures.accuracy is not None and figures.accuracy_s is not None
    ]
    if not judged:
        return None
    best, most, best_s = max(judged, key=lambda entry: entry[1].mid)
    text = f"{best.cell}{_shared(best)}: {percent(most.mid)} after {seconds(best_s)}"
    # Repeats have seeds of their own: what lies within their range may be luck.
    as_good = [entry for entry in judged if entry[1].mid >= most.low]
    quick, accuracy, quick_s = min(as_good, key=lambda entry: entry[2].mid)
    if quick is not best:
        text += (
            f". Within its repeats' range, and quicker: {quick.cell}{_shared(quick)}, "
            f"{percent(accuracy.mid)} after {seconds(quick_s)}"
        )
    return Advice("Best accuracy", text + ".")


def _too_small(analysis: Analysis) -> Advice | None:
    rows = [_first_too_small(analysis.row(batch)) for batch in analysis.batches]
    sentences = [sentence for sentence in rows if sentence]
    if not sentences:
        return None
    return Advice(
        "Sub-batch too small", f"{' '.join(sentences)} What helps: a larger batch, or fewer workers."
    )


def _first_too_small(row: Sequence[Figures]) -> str:
    before: Figures | None = None
    for figures in row:
        if figures.cell.workers > 1 and not figures.is_oversubscribed:
            reasons = _why_too_small(figures, before)
            if reasons:
                each = f"{_number(figures.worker_batch, 'sample')} a worker"
                return f"{figures.cell}, {each}: {', '.join(reasons)}."
        before = figures
    return ""


def _why_too_small(figures: Figures, before: Figures | None) -> list[str]:
    reasons = []
    if before is not None and figures.samples_s.mid < before.samples_s.mid:
        reasons.append(f"slower than {_number(before.cell.workers, 'worker')}")
    if figures.sync_share.mid > _SYNC_SHARE:
        reasons.append(f"{percent(figures.sync_share.mid)} of a step waits for gradients")
    if figures.efficiency is not None and figures.efficiency.mid < _EFFICIENCY:
        reasons.append(f"efficiency {percent(figures.efficiency.mid)}")
    return reasons


def _prediction(analysis: Analysis) -> Advice | None:
    if not analysis.laws:
        return None
    batch, law = max(analysis.laws.items(), key=lambda item: item[1].speed_up(analysis.workers[-1]))
    further = [factor * analysis.workers[-1] for factor in _FURTHER]
    ahead = " and ".join(f"{law.speed_up(workers):.1f}x on {workers}" for workers in further)
    limit = f", and never more than {law.limit:.1f}x" if law.limit < 1000 else ""
    text = (
        f"Batch {batch} scales best: {law.name}'s law, if {percent(law.serial)} does not {law.verb}, "
        f"predicts {ahead} workers{limit}, as long as each has a core of its own. It was fitted to "
        f"{_number(law.points, 'worker count')} above "
        f"1{', which says nothing about how well it fits' if law.points == 1 else ''}."
    )
    return Advice("More workers", text)


def _oversubscribed(analysis: Analysis) -> Advice | None:
    counts = sorted(
        {figures.cell.workers for figures in analysis.cells.values() if figures.is_oversubscribed}
    )
    if not counts:
        return None
    workers = ", ".join(map(str, counts))
    text = (
        f"{workers} workers share {_number(analysis.cores, 'core')}: their speed-ups say how they get on "
        "together, not how hardware scales, and no law is fitted to them."
    )
    return Advice("Shared cores", text)


def _stalled(analysis: Analysis) -> Advice | None:
    if not analysis.stalls:
        return None
    worst = max(analysis.stalls, key=lambda stall: stall.seconds)
    text = (
        f"{_number(len(analysis.stalls), 'step')} took far longer than their neighbours and are left out of "
        f"every figure; the worst is {describe(worst)}. The report lists all of them, and what they change."
    )
    return Advice("Stalls", text)


def _missing(analysis: Analysis, impossible: dict[Cell, str]) -> Advice | None:
    parts = []
    if analysis.ended:
        cells = sorted({record.cell for record in analysis.ended})
        parts.append(f"{_number(len(analysis.ended), 'run')} did not end well: {'; '.join(map(str, cells))}.")
    if impossible:
        parts.append(
            f"{_number(len(impossible), 'cell')} cannot be run: {'; '.join(map(str, sorted(impossible)))}."
        )
    return Advice("Not measured", f"{' '.join(parts)} The report has the reasons.") if parts else None


def _busy(records: Sequence[Record]) -> Advice | None:
    busy = [record for record in records if record.busy > _BUSY]
    if not busy:
        return None
    text = (
        f"{len(busy)} of {_number(len(records), 'run')} began while other programs used more than "
        f"{100 * _BUSY:.0f}\u00a0% of the processors (up to "
        f"{percent(max(record.busy for record in busy))}): repeat them at a quiet time, in another folder."
    )
    return Advice("The machine was not quiet", text)


def describe(stall: Stall) -> str:
    """Return where a stall was and how long, in a clause."""
    where = f"step {stall.step} of {stall.record.cell}, repeat {stall.record.repeat + 1}"
    return f"{where}: {duration(stall.seconds)} instead of {duration(stall.usual_s)}"


def percent(share: float) -> str:
    """Return a share in percent, with a space that does not break."""
    return f"{100 * share:.1f}\u00a0%" if share < 1 else f"{100 * share:.0f}\u00a0%"


def seconds(figure: Range) -> str:
    """Return a time with its range over the repeats."""
    if figure.low == figure.high:
        return duration(figure.mid)
    return f"{duration(figure.mid)} ({duration(figure.low)} to {duration(figure.high)})"


def duration(value: float) -> str:
    """Return seconds with a unit that suits them."""
    if value >= 60:
        return f"{value / 60:.1f}\u00a0min"
    return f"{value:.2f}\u00a0s" if value >= 1 else f"{1e3 * value:.3g}\u00a0ms"


def _shared(figures: Figures) -> str:
    return " (sharing cores)" if figures.is_oversubscribed else ""


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
