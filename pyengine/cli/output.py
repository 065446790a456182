"""What the reports of several commands share: tables and plain words for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table


class Tables:
    """Prints to a console; reports for people begin with it."""

    def __init__(self) -> None:
        self._console = Console()

    def _say(self, text: str) -> None:
        """Print plain words, on one line however long it is."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def add_numbers(table: Table, names: Iterable[str]) -> None:
    """Add columns of numbers to a table."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
