"""Reports of commands: tables and sentences for people, JSON lines for programs, nothing on other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from pyengine.cli.terminal import print_json

_LEAST_WIDTH = 80  # least width of a wide table on any terminal: rich would shorten its numbers


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again, for `terminal.exit_code`; rich would exit with code 1."""
        raise BrokenPipeError


class Report:
    """The base of every command's report: a method an event, as text or JSON lines; silent on other ranks."""

    def __init__(self, *, as_json: bool = False, is_silent: bool = False) -> None:
        self._as_json, self._is_silent = as_json, is_silent
        self._console = _Console(quiet=as_json or is_silent)

    def _emit(self, event: str, **values: Any) -> bool:
        """Print an event as a JSON line with `--json`; return whether text is printed instead."""
        if self._as_json and not self._is_silent:
            print_json(event, **values)
        return not (self._as_json or self._is_silent)

    def _say(self, text: str) -> None:
        """Print a sentence on one line, however long it is."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _print(self, table: Table, paragraphs: Iterable[str] = ()) -> None:
        """Print a table, and below it paragraphs that are wrapped at the width of the terminal."""
        options = self._console.options.update(width=_LEAST_WIDTH)
        needed = Measurement.get(self._console, options, table).maximum
        if needed > self._console.width:
            table.width = needed
        self._console.print(table, crop=False)
        for text in paragraphs:
            self._console.print(text, highlight=False, markup=False)

    def _make_progress(self, *columns: ProgressColumn, **options: Any) -> Progress:
        """Return a live line with description, bar, count and more columns, shown on terminals only."""
        is_shown = self._console.is_terminal and not self._console.quiet
        every = TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn()
        return Progress(*every, *columns, console=self._console, disable=not is_shown, **options)


def add_numbers(table: Table, names: Iterable[str]) -> None:
    """Add columns of numbers to a table."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
