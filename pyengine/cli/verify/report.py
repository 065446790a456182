"""The report of `verify`: progress, then a table and the result for each training function."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from rich.markup import escape
from rich.status import Status
from rich.table import Table

from pyengine.cli import report
from pyengine.cli.verify.compare import Difference
from pyengine.cli.verify.probe import KINDS, START, Run, Trace


@dataclass(frozen=True)
class WorldSizeResult:
    """How a run differs from the reference: the first difference, its elements as text, and likely causes."""

    reference: str
    run: str
    first: Difference
    elements: str
    causes: list[tuple[str, str]]


class VerifyReport(report.Report):
    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__(as_json=as_json)
        self._status = Status("", console=self._console)
        self._rows: dict[str, list[tuple[str, ...]]] = {}

    def live(self) -> AbstractContextManager[object]:
        return nullcontext() if self._console.quiet else self._status

    def begin(self, run: Run, *, still: int) -> None:
        """Report the start of a run; `still` is the number of runs that follow."""
        text = f"running {run.label} ({still} to follow)" if still else f"running {run.label} (the last one)"
        self._status.update(escape(text))
        if not self._console.is_terminal:
            self._say(text)

    def ran(self, subject: str, run: Run, trace: Trace, seconds: float, first: Difference | None) -> None:
        """Report the end of a run; `first` is its first difference from the reference."""
        self._emit(
            "run",
            subject=subject,
            run=run.label,
            workers=run.workers,
            steps=trace.steps,
            digest=summary(trace),
            identical=first is None,
            seconds=round(seconds, 3),
        )
        rows = self._rows.setdefault(subject, [])
        verdict = "yes" if first is None else f"no: {place(first)}"
        if first is None and not rows:
            verdict = "reference"
        rows.append((run.label, str(trace.steps), summary(trace), verdict))
        self._status.update("comparing the runs")

    def conclude(self, subject: str, finding: WorldSizeResult | None, reference: Trace) -> None:
        """Report the result for a training function; `finding` is the first run that differs, or None."""
        found: dict[str, Any] = {}
        if finding is not None:
            causes = [{"name": name, "text": text} for name, text in finding.causes]
            found = asdict(finding) | {"causes": causes}
        self._emit("verdict", subject=subject, identical=finding is None, **found)
        table = Table(title=escape(subject))
        for name in ("run", "steps", "digest", "identical"):
            table.add_column(
                name, no_wrap=name != "identical", justify="right" if name == "steps" else "left"
            )
        for row in self._rows[subject]:
            table.add_row(*map(escape, row))
        self._print(table, [*sentences(subject, finding, reference), ""])


def summary(trace: Trace) -> str:
    """Return a digest of all values that a rank has recorded."""
    return blake2b(repr(sorted(trace.entries.items())).encode(), digest_size=6).hexdigest()


def place(first: Difference) -> str:
    """Return the step and the entry of a difference, for example `step 0, gradient of head.weight`."""
    step = "before the first step" if first.step == START else f"step {first.step}"
    return f"{step}, {KINDS[first.kind].format(first.name)}"


def sentences(subject: str, finding: WorldSizeResult | None, reference: Trace) -> list[str]:
    """Return the result as a list of paragraphs."""
    if finding is None:
        number = len(reference.entries)
        return [
            f"Identical: all runs of {subject} agree in every bit of {number} recorded values, on every rank."
        ]
    first = finding.first
    other = "its own rank 0" if finding.run == finding.reference else finding.reference
    run = f"on rank {first.rank} of {finding.run}"
    where = [f"Not identical: {subject} first differs from {other} at {place(first)}, {run}."]
    where.append(finding.elements or "When both runs were repeated to compare this value, both agreed.")
    counts = [f"{kind} {differ} of {total}" for kind, (differ, total) in first.counts.items() if differ]
    where.append(f"At that step and on that rank, the following values differ: {', '.join(counts)}.")
    return [*where, *(f"Likely cause ({name}): {text}" for name, text in finding.causes)]
