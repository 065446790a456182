"""What `verify` shows: progress, a table and plain words for people, JSON lines for programs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import blake2b

from rich.markup import escape
from rich.status import Status
from rich.table import Table

from pyengine.cli import output
from pyengine.cli.terminal import print_json
from pyengine.cli.verify.compare import Difference, Elements
from pyengine.cli.verify.probe import START, Run, Trace


@dataclass(frozen=True)
class Finding:
    """Why a run is not the reference.

    Attributes:
        elements: of the tensor in which they first differ; None if it has none, or it was the same when
            repeated.
        causes: (name, text), likely ones first.
    """

    reference: str
    run: str
    first: Difference
    elements: Elements | None
    causes: list[tuple[str, str]]


class Report:
    """Hears what happens, and shows nothing of it."""

    def live(self) -> AbstractContextManager[object]:
        """Show what goes on, as long as the context is open."""
        return nullcontext()

    def begin(self, run: Run, *, still: int) -> None:
        """Hear that a run begins, and how many follow it."""

    def ran(self, subject: str, run: Run, trace: Trace, seconds: float, first: Difference | None) -> None:
        """Hear that a run has ended, and where it is not the reference."""

    def conclude(self, subject: str, finding: Finding | None, reference: Trace) -> None:
        """Hear the verdict on a subject."""


class JsonLines(Report):
    """One object a line on stdout; `event` says which."""

    def ran(self, subject: str, run: Run, trace: Trace, seconds: float, first: Difference | None) -> None:
        """Print the run."""
        print_json(
            "run",
            subject=subject,
            run=run.label,
            workers=run.workers,
            steps=trace.steps,
            digest=summary(trace),
            identical=first is None,
            seconds=round(seconds, 3),
        )

    def conclude(self, subject: str, finding: Finding | None, reference: Trace) -> None:
        """Print the verdict."""
        if finding is None:
            print_json("verdict", subject=subject, identical=True)
            return
        print_json(
            "verdict",
            subject=subject,
            identical=False,
            reference=finding.reference,
            run=finding.run,
            first=asdict(finding.first),
            elements=finding.elements and asdict(finding.elements),
            causes=[{"name": name, "text": text} for name, text in finding.causes],
        )


class Tables(output.Tables, Report):
    """A live line while runs go on, then a table and the verdict for each subject."""

    def __init__(self) -> None:
        super().__init__()
        self._status = Status("", console=self._console)
        self._rows: dict[str, list[tuple[str, ...]]] = {}

    def live(self) -> AbstractContextManager[object]:
        """Show a line that moves."""
        return self._status

    def begin(self, run: Run, *, still: int) -> None:
        """Show the run; one line each where stdout is no terminal."""
        text = f"running {run.label} ({still} to follow)" if still else f"running {run.label} (the last one)"
        self._status.update(escape(text))
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False)

    def ran(self, subject: str, run: Run, trace: Trace, seconds: float, first: Difference | None) -> None:
        """Keep the row."""
        rows = self._rows.setdefault(subject, [])
        verdict = "yes" if first is None else f"no: {place(first)}"
        if first is None and not rows:
            verdict = "reference"
        rows.append((run.label, str(trace.steps), summary(trace), verdict))
        self._status.update("looking where the runs part, if they do")

    def conclude(self, subject: str, finding: Finding | None, reference: Trace) -> None:
        """Print the table and the verdict."""
        table = Table(title=escape(subject))
        for name in ("run", "steps", "digest", "identical"):
            table.add_column(
                name, no_wrap=name != "identical", justify="right" if name == "steps" else "left"
            )
        for row in self._rows[subject]:
            table.add_row(*map(escape, row))
        self._console.print(table)
        for text in sentences(subject, finding, reference):
            self._console.print(text, highlight=False, markup=False)
        self._console.print()


def summary(trace: Trace) -> str:
    """Return a digest of everything a rank recorded."""
    return blake2b(repr(sorted(trace.entries.items())).encode(), digest_size=6).hexdigest()


def place(first: Difference) -> str:
    """Return step and entry, as `step 0, gradient of head.weight`."""
    step = "before the first step" if first.step == START else f"step {first.step}"
    return f"{step}, {_ENTRY[first.kind].format(first.name)}"


def sentences(subject: str, finding: Finding | None, reference: Trace) -> list[str]:
    """Return the verdict in plain words, a paragraph each."""
    if finding is None:
        number = len(reference.entries)
        return [
            f"Identical: all runs of {subject} agree in every bit of {number} recorded values, on every rank."
        ]
    first = finding.first
    other = "its own rank 0" if finding.run == finding.reference else finding.reference
    run = f"on rank {first.rank} of {finding.run}"
    where = [f"Not identical: {subject} first differs from {other} at {place(first)}, {run}."]
    where += _values(finding)
    counts = [f"{kind} {differ} of {total}" for kind, (differ, total) in first.counts.items() if differ]
    where.append(f"In that step and rank, these differ: {', '.join(counts)}.")
    return [*where, *(f"Likely cause ({name}): {text}" for name, text in finding.causes)]


def _values(finding: Finding) -> list[str]:
    elements = finding.elements
    if finding.first.kind == "window":
        ours, theirs = finding.first.texts
        return [f"The window holds {theirs}, and {ours} in the reference."]
    if elements is None:
        return ["When both runs were repeated to look at it, this value was the same."]
    if elements.values is None:
        ours, theirs = elements.about
        return [f"It is {theirs}, and {ours} in the reference."]
    here, there = elements.values
    element = f"Element {elements.index} (flat) is {there:.9g}, and {here:.9g} in the reference"
    extent = f"{elements.differ} of {elements.total} elements differ, by at most {elements.largest:.3g}"
    return [f"{element}; {extent}."]


_ENTRY = {
    "window": "what the {} holds",
    "buffer": "buffer {}",
    "gradient": "gradient of {}",
    "norm": "the gradient {}",
    "parameter": "parameter {}",
    "state": "optimizer state {}",
}
