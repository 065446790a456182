"""Write the tables of whole windows and the plots in docs/ from the newest result files.

    python benchmarks/render_numbers.py

The text of block NAME is written between the markers `numbers:begin NAME` and `numbers:end` of a page. If the
block's files are missing, the old text stays. tests/house/test_numbers.py compares pages and plots with the
files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _ahead import LEAST_WINDOWS, Comparison, comparisons, explained
from _peer_results import CONTROL, Measured, first, newest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/numbers.md", "docs/wires.md", "docs/sharded.md", "docs/reproducible.md")
_BLOCK = re.compile(r"(<!-- numbers:begin (\S+) -->\n)(.*?)(<!-- numbers:end -->)", re.DOTALL)
_OVERVIEW = (
    *("ddp", "no_sync_view", "accelerate", "fabric", "trainer", "zero0", "zero1"),
    *("megatron", "fsdp2_deferred", "replicate_deferred", "no_sync_bf16", "no_sync_powersgd"),
    *("engine", "attach", "attach_fsdp2", "engine_bf16", "attach_bf16", "engine_int8_ef"),
    *("engine_exact_slots", "engine_shared", "attach_shared"),
)
_ROWS = (
    *(CONTROL[0], "floor", "ddp", "accelerate", "megatron"),
    *("no_sync_bf16", "no_sync_powersgd", "engine", "attach", "engine_native_bf16", "attach_native_bf16"),
    *("engine_bf16", "attach_bf16", "engine_int8_ef", "engine_shared", "attach_shared"),
)
_LOOPBACK = ("base", "wires", "deepspeed")
_GBIT = ("gbit", "gbit-wires", "gbit-deepspeed")


@dataclass(frozen=True)
class Column:
    """A column of a table, with a figure of every variant.

    Attributes:
        launches: names of launches; the figure is that of the first launch that measured the variant.
        figure: "window" for the time relative to the control, or a key of the rows of result files.
    """

    title: str
    launches: tuple[str, ...]
    figure: str = "window"


@dataclass(frozen=True)
class Table:
    """A table with a row per variant; the default variants are those of the first column's first launch."""

    columns: tuple[Column, ...]
    variants: tuple[str, ...] = ()


TABLES = {
    "overview": Table(
        (
            Column("window, loopback", _LOOPBACK),
            Column("window, 1 Gbit/s", _GBIT),
            Column("sent MB", _LOOPBACK, "sent_mb"),
            Column("peak MB", ("memory",), "peak_mb"),
            Column("gradient error", ("truth",), "error"),
        ),
        _OVERVIEW,
    ),
    "networks": Table(
        (
            Column("2 workers, 1 Gbit/s", _GBIT),
            Column("2 workers, 100 Mbit/s", ("slow",)),
            Column("4 workers, loopback", ("workers-4",)),
            Column("4 workers, 1 Gbit/s", ("gbit-workers-4",)),
        ),
        _ROWS,
    ),
    "windows": Table(
        (
            Column("1 micro-batch", ("every-1",)),
            Column("4 micro-batches", ("every-4",)),
            Column("8", _LOOPBACK),
            Column("16", ("every-16",)),
        ),
        _ROWS,
    ),
    "models": Table((Column("CNN", ("cnn",)), Column("1000 small parameters", ("small",))), _ROWS),
    "machinery": Table(
        (
            Column("GPT fp32", ("gpt0",)),
            Column("1000 small fp32", ("small0",)),
            Column("GPT bf16", ("gpt0-bf16",)),
            Column("GPT bf16, 1 Gbit/s", ("gbit-gpt0-bf16",)),
        ),
        _ROWS,
    ),
    "sharded-states": Table(
        (
            Column("window, loopback", ("sharded-states",)),
            Column("window, 1 Gbit/s", ("gbit-sharded-states",)),
            Column("sent MB", ("sharded-states",), "sent_mb"),
            Column("collectives", ("sharded-states",), "collectives"),
        )
    ),
    "wires": Table(
        (
            Column("window, 1 Gbit/s", ("gbit-wires",)),
            Column("window, 100 Mbit/s", ("slow",)),
            Column("sent MB", ("gbit-wires",), "sent_mb"),
        )
    ),
    "shared-memory": Table(
        (
            Column("2 ranks", _LOOPBACK),
            Column("4 ranks", ("workers-4",)),
            Column("gradients alone, 2 ranks", ("gpt0",)),
        ),
        (CONTROL[0], "engine", "engine_shared", "attach", "attach_shared"),
    ),
    "sharded": Table(
        (
            Column("window, 2 ranks, 1 Gbit/s", ("gbit-sharded",)),
            Column("sent MB, 2 ranks", ("gbit-sharded",), "sent_mb"),
            Column("sent MB, 4 ranks", ("sharded-4",), "sent_mb"),
        ),
        (
            *(CONTROL[0], "fsdp2", "fsdp2_deferred"),
            *("attach_fsdp2_none", "attach_fsdp2", "attach_fsdp2_gathered"),
        ),
    ),
    "exact": Table(
        (
            Column("window, loopback", _LOOPBACK),
            Column("window, 1 Gbit/s", ("gbit-wires",)),
            Column("window, 100 Mbit/s", ("slow",)),
            Column("peak MB", ("memory",), "peak_mb"),
        ),
        (CONTROL[0], "engine", "engine_exact_slots", "engine_exact"),
    ),
}
_FORMATS = {"sent_mb": ".1f", "peak_mb": ".0f", "collectives": ".0f", "error": ".0e"}
# Launches that the page shows only in a plot.
SIZES = {
    "5.1 M, loopback": "5m",
    "26.1 M, loopback": "26m",
    "5.1 M, 1 Gbit/s": "gbit-5m",
    "26.1 M, 1 Gbit/s": "gbit-26m",
}
NO = "–"

Results = dict[str, Measured]


def main() -> None:
    """Write pages and plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that contains the pages")
    options = parser.parse_args()
    results = newest(options.results)
    for name in PAGES:
        page = options.root / name
        page.write_text(rendered(page.read_text(), results))
        print("wrote", page)
    from _plots import PLOTS, draw  # imports matplotlib, which tests of the pages do not need

    for plot in PLOTS:
        if plot.figures(options.results):
            draw(plot, options.results, options.root / "docs")


def rendered(page: str, results: Results) -> str:
    """Return a page, with new text in every block whose result files exist."""

    def block(match: re.Match[str]) -> str:
        begin, name, old, end = match.groups()
        return begin + (_made(name, results) or old) + end

    return _BLOCK.sub(block, page)


def _made(name: str, results: Results) -> str:
    lines = table(TABLES[name], results) if name in TABLES else BLOCKS[name](results)
    return "\n".join([*lines, ""]) if lines else ""


# ---- the machine and the method ----


def machine(results: Results) -> list[str]:
    """Return where and when the numbers were measured."""
    if not results:
        return []
    dates = sorted({one.date for one in results.values()})
    launches: dict[str, list[str]] = {}
    for name, one in results.items():
        launches.setdefault(_card(one), []).append(f"`{name}`")
    usual, *others = sorted(launches, key=lambda card: -len(launches[card]))
    cards = "; ".join([usual, *(f"{', '.join(launches[card])} on {card}" for card in others)])
    seconds = sum(one.content["seconds"] for one in results.values())
    taken = f"Taken on {' and '.join(dates)} in {seconds / 60:.0f} minutes; {cards}. "
    return [taken + "One thread per worker. Other machines have other milliseconds."]


def _card(one: Measured) -> str:
    card = one.content["machine"]
    return f"{card['cores']} cores of {card['cpu']} ({card['isa']}), Linux {card['kernel']}, " + (
        f"Python {card['python']}, torch {card['torch']}"
    )


# ---- tables ----


def table(layout: Table, results: Results) -> list[str]:
    """Return a table, and the files of its launches; columns without a file are left out.

    A variant has a row if it was measured in at least half of the columns with windows. The last row is the
    largest noise among each column's launches.
    """
    columns = [one for one in layout.columns if not results.keys().isdisjoint(one.launches)]
    if not columns:
        return []
    launches = dict.fromkeys(name for one in columns for name in one.launches if name in results)
    lines = _head("", *(one.title for one in columns))
    for name in layout.variants or results[columns[0].launches[0]].rows:
        cells = [_figure(one, name, results) for one in columns]
        found = [cell for one, cell in zip(columns, cells, strict=True) if one.figure == "window"]
        measured = first(results, name, [*launches])
        if measured is not None and name != CONTROL[1] and 2 * found.count(NO) <= len(found):
            lines.append(_line(_label(measured, name), *cells))
    noise = [_noise(one.launches, results) if one.figure == "window" else NO for one in columns]
    links = ", ".join(_link(name, results[name]) for name in launches)
    return [*lines, _line("noise", *noise), "", f"Files: {links}."]


def _figure(column: Column, name: str, results: Results) -> str:
    """Return a cell: a window's time (relative to the control; in ms for the control) or another figure."""
    found = first(results, name, column.launches)
    if found is None:
        return NO
    if column.figure == "window":
        return (
            f"{found.median(name):.0f} ms" if name == CONTROL[0] else f"{found.ratio(name, CONTROL[0]):.2f}"
        )
    value = found.rows[name].get(column.figure)
    return NO if value is None else format(value, _FORMATS[column.figure])


def _noise(launches: tuple[str, ...], results: Results) -> str:
    return f"{max(results[one].noise for one in launches if one in results):.0%}"


def _link(title: str, one: Measured) -> str:
    return f"[{title}](../benchmarks/results/{one.path.name})"


def _label(one: Measured, name: str) -> str:
    return f"**{one.label(name)}**" if one.is_ours(name) else one.label(name)


def ahead(results: Results) -> list[str]:
    """Return in how many comparisons with equal bytes a peer is ahead by more than the noise, and why."""
    found = comparisons(results)
    if not found:
        return []
    lost = [one for one in found if one.is_lost]
    won = sum(one.is_won for one in found)
    counted = (
        f"Of {len(found)} comparisons with a peer that sends the same bytes, in launches of {LEAST_WINDOWS} "
        f"windows or more, pyengine is faster by more than the noise in {won}, a peer in {len(lost)}."
    )
    if not lost:
        return [counted]
    lines = [_line("why", "ours", "launches", "slower by"), "|---|---|---|---:|"]
    alike: dict[str, list[Comparison]] = {}
    for one in lost:
        alike.setdefault(explained(one), []).append(one)
    for why, behind in alike.items():
        ours = dict.fromkeys(results[one.launch].label(one.ours) for one in behind)
        launches = dict.fromkeys(_link(f"`{one.launch}`", results[one.launch]) for one in behind)
        least, most = (f"{find(one.ratio for one in behind) - 1:.0%}" for find in (min, max))
        span = least if least == most else f"{least} to {most}"
        lines.append(_line(why, "; ".join(ours), ", ".join(launches), span))
    return [counted, "", *lines]


def sizes(results: Results) -> list[str]:
    """Return the plot over model sizes, workers and window lengths, and the result files of the sizes."""
    links = [_link(title, results[name]) for title, name in SIZES.items() if name in results]
    if not links:
        return []
    alt = "Exposed sync over parameters, accumulation and workers"
    return [f"![{alt}](numbers-growth.svg)", "", f"Files of other sizes: {', '.join(links)}."]


def plot(results: Results) -> list[str]:
    """Return the plot of exposed sync."""
    if not {"gbit", "gbit-wires"} <= set(results):
        return []
    return ["![What synchronization adds to a window](numbers.svg)"]


BLOCKS: dict[str, Callable[[Results], list[str]]] = {
    "machine": machine,
    "plot": plot,
    "ahead": ahead,
    "sizes": sizes,
}


def _head(first_column: str, *columns: str) -> list[str]:
    return [_line(first_column, *columns), "|---|" + "---:|" * len(columns)]


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
