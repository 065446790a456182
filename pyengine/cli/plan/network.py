"""`plan --link`: windows on networks, wire by wire; and `plan --measure`, what they are predicted from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pyengine.cli.output import add_numbers
from pyengine.cli.plan import calibration, model
from pyengine.cli.plan.measure import measure
from pyengine.cli.plan.model import Cluster, Sync
from pyengine.cli.plan.network_arguments import Measure, Settings
from pyengine.cli.terminal import print_json
from pyengine.cli.wires import PLANNED

_ABOUT = 1.1  # times as many micro-batches as the fewest


@dataclass(frozen=True)
class Row:
    """One wire on one network.

    Attributes:
        loss: what the wire does to the sum.
        accumulate: micro-batches a window.
        is_best: of the wires here that take about the fewest micro-batches the one that loses least, or of
            several the one with the shortest window.
    """

    link_gbit_s: float
    hosts: int
    world_size: int
    wire: str
    loss: str
    accumulate: int
    sync: Sync
    window_s: float
    is_best: bool


def run_measure(settings: Measure) -> int:
    """Calibrate this machine into a file; return the exit code."""
    calibration.write(measure(), settings.file)
    print(f"wrote {settings.file}: pass it as --calibration")
    return 0


def run(settings: Settings) -> int:
    """Print what is predicted, and draw it if asked; return the exit code."""
    draw = _draw() if settings.plot else None
    rows = [
        row for link in settings.links for hosts in settings.hosts for row in _rows(link, hosts, settings)
    ]
    (_print_json if settings.json else _print_tables)(rows, settings)
    if draw and settings.plot:
        draw(rows, settings.plot)
    return 0


def _draw() -> Callable[[Sequence[Row], Path], None]:
    """Return what draws; matplotlib, which it needs, may be absent."""
    from pyengine.cli.plan.plot import draw

    return draw


def _rows(link: float, hosts: int, settings: Settings) -> list[Row]:
    """Return a row for each wire on one network."""
    cluster = Cluster(hosts, settings.ranks_per_host, link * 125e6, settings.cores_per_rank)
    work = settings.work
    found: list[Row] = []
    for name in settings.wires:
        sync = model.sync(PLANNED[name], work, cluster, settings.speeds)
        accumulate = settings.accumulate or work.least_accumulate(sync.exposed_s, settings.share)
        window_s = work.window_s(accumulate, sync.exposed_s)
        loss = model.loss_of(PLANNED[name])
        row = Row(link, hosts, cluster.world_size, name, loss, accumulate, sync, window_s, is_best=False)
        found.append(row)
    fewest = min(row.accumulate for row in found)
    good = [row for row in found if row.accumulate <= _ABOUT * fewest]
    best = min(good, key=lambda row: (model.LOSSES.index(row.loss), row.window_s))
    return [replace(row, is_best=row is best) for row in found]


def _print_json(rows: Sequence[Row], settings: Settings) -> None:
    for row in rows:
        sync = asdict(row.sync) | {"limit": row.sync.limit}
        print_json("network", **asdict(row) | {"sync": sync})


def _print_tables(rows: Sequence[Row], settings: Settings) -> None:
    console = Console()
    for link in settings.links:
        console.print(_table([row for row in rows if row.link_gbit_s == link]))
    console.print(_caption(settings), highlight=False)
    for loss in dict.fromkeys(row.loss for row in rows):
        names = [name for name in settings.wires if model.loss_of(PLANNED[name]) == loss]
        console.print(f"{loss}: {', '.join(names)}", highlight=False)


def _table(rows: Sequence[Row]) -> Table:
    """Return the table of one link."""
    table = Table(
        title=f"{rows[0].link_gbit_s:g} Gbit/s", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0)
    )
    add_numbers(table, ["ranks"])
    table.add_column("wire", no_wrap=True)
    add_numbers(table, ["sent", "sync", "exposed", "A", "window"])
    table.add_column("limit", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        is_new = before is None or before.hosts != row.hosts
        if before and is_new:
            table.add_section()
        sync = row.sync
        times = [_time(sync.total_s), _time(sync.exposed_s), str(row.accumulate), _time(row.window_s)]
        table.add_row(
            str(row.world_size) if is_new else "",
            f"{row.wire} *" if row.is_best else row.wire,
            decimal(sync.bytes_sent),
            *times,
            sync.limit,
            style="bold" if row.is_best else None,
        )
    return table


def _caption(settings: Settings) -> str:
    work = settings.work
    asked = "" if settings.accumulate else f"; exposed at most {100 * settings.share:g} % of a window"
    return (
        f"{work.numel / 1e6:,.1f} M gradients in {work.num_buckets} buckets, "
        f"forward {_time(work.forward_s)}, backward {_time(work.backward_s)}, step {_time(work.step_s)}"
        f"{asked}. *: what to take."
    )


def _time(seconds: float) -> str:
    """Return seconds in three digits or so."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
