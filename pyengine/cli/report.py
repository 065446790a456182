"""Reports that one rank prints for a command: tables and sentences, or JSON lines for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from pyengine.cli.terminal import print_json

# On narrow terminals, tables are not shrunk below this width, because rich would shorten their numbers.
_LEAST_WIDTH = 80


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Re-raise the error for `terminal.exit_code`; rich would exit with code 1."""
        raise BrokenPipeError


class Report:
    """Base class of reports; each method prints an event as text or JSON, unless the report is silent."""

    def __init__(self, *, as_json: bool = False, is_silent: bool = False) -> None:
        self._as_json, self._is_silent = as_json, is_silent
        self._console = _Console(quiet=as_json or is_silent)

    def _emit(self, event: str, **values: Any) -> bool:
        """With `--json`, print an event as a JSON line; return whether to print text instead."""
        if self._as_json and not self._is_silent:
            print_json(event, **values)
        return not (self._as_json or self._is_silent)

    def _say(self, text: str) -> None:
        """Print a sentence on one line, however long it is."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _print(self, table: Table, paragraphs: Iterable[str] = ()) -> None:
        """Print a table, followed by paragraphs that are wrapped at the width of the terminal."""
        options = self._console.options.update(width=_LEAST_WIDTH)
        needed = Measurement.get(self._console, options, table).maximum
        if needed > self._console.width:
            table.width = needed
        self._console.print(table, crop=False)
        for text in paragraphs:
            self._console.print(text, highlight=False, markup=False)

    def _make_progress(self, *columns: ProgressColumn, **options: Any) -> Progress:
        """Return a live line (shown only on terminals) with a description, a bar, a count and `columns`."""
        is_shown = self._console.is_terminal and not self._console.quiet
        every = TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn()
        return Progress(*every, *columns, console=self._console, disable=not is_shown, **options)


def add_numbers(table: Table, names: Iterable[str]) -> None:
    """Add columns of numbers to a table."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
