"""Write the tables of whole windows and the plots in docs/ from the newest result files.

    python benchmarks/render_numbers.py

The text of block NAME is written between the marks `numbers:begin NAME` and `numbers:end` of the page. If its
files are missing, the old text stays. tests/house/test_numbers.py compares page and plots with the files.
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
    *("floor", "ddp", "accelerate", "megatron"),
    *("no_sync_bf16", "no_sync_powersgd", "engine", "attach", "engine_native_bf16", "attach_native_bf16"),
    *("engine_bf16", "attach_bf16", "engine_int8_ef", "engine_shared", "attach_shared"),
)
_LOOPBACK = ("base", "wires", "deepspeed")
_GBIT = ("gbit", "gbit-wires", "gbit-deepspeed")
# By block: the titles of the table's columns, and their launches. The first that measured a variant counts.
TABLES = {
    "networks": {
        "2 workers, 1 Gbit/s": _GBIT,
        "2 workers, 100 Mbit/s": ("slow",),
        "4 workers, loopback": ("workers-4",),
        "4 workers, 1 Gbit/s": ("gbit-workers-4",),
    },
    "windows": {
        "1 micro-batch": ("every-1",),
        "4 micro-batches": ("every-4",),
        "8": _LOOPBACK,
        "16": ("every-16",),
    },
    "models": {"CNN": ("cnn",), "1000 small parameters": ("small",)},
    "machinery": {
        "GPT fp32": ("gpt0",),
        "1000 small fp32": ("small0",),
        "GPT bf16": ("gpt0-bf16",),
        "GPT bf16, 1 Gbit/s": ("gbit-gpt0-bf16",),
    },
}


@dataclass(frozen=True)
class Column:
    """A column of a table: a figure of every variant.

    Attributes:
        launches: the first that measured a variant counts.
        figure: "window", relative to the control; or a key of the rows of result files.
    """

    title: str
    launches: tuple[str, ...]
    figure: str = "window"


# By block: the columns, and the variants with a row; without variants, those of the first column's launch.
FIGURES: dict[str, tuple[tuple[Column, ...], tuple[str, ...]]] = {
    "sharded-states": (
        (
            Column("window, loopback", ("sharded-states",)),
            Column("window, 1 Gbit/s", ("gbit-sharded-states",)),
            Column("sent MB", ("sharded-states",), "sent_mb"),
            Column("collectives", ("sharded-states",), "collectives"),
        ),
        (),
    ),
    "wires": (
        (
            Column("window, 1 Gbit/s", ("gbit-wires",)),
            Column("window, 100 Mbit/s", ("slow",)),
            Column("sent MB", ("gbit-wires",), "sent_mb"),
        ),
        (),
    ),
    "shared-memory": (
        (
            Column("2 ranks", _LOOPBACK),
            Column("4 ranks", ("workers-4",)),
            Column("gradients alone, 2 ranks", ("gpt0",)),
        ),
        ("no_sync_view", "engine", "engine_shared", "attach", "attach_shared"),
    ),
    "sharded": (
        (
            Column("window, 2 ranks, 1 Gbit/s", ("gbit-sharded",)),
            Column("sent MB, 2 ranks", ("gbit-sharded",), "sent_mb"),
            Column("sent MB, 4 ranks", ("sharded-4",), "sent_mb"),
        ),
        (
            "no_sync_view",
            "fsdp2",
            "fsdp2_deferred",
            "attach_fsdp2_none",
            "attach_fsdp2",
            "attach_fsdp2_gathered",
        ),
    ),
    "exact": (
        (
            Column("window, loopback", _LOOPBACK),
            Column("window, 1 Gbit/s", ("gbit-wires",)),
            Column("window, 100 Mbit/s", ("slow",)),
            Column("peak MB", ("memory",), "peak_mb"),
        ),
        ("no_sync_view", "engine", "engine_exact_slots", "engine_exact"),
    ),
}
# Launches that the page shows only in a plot.
SIZES = {
    "5.1 M, loopback": "5m",
    "26.1 M, loopback": "26m",
    "5.1 M, 1 Gbit/s": "gbit-5m",
    "26.1 M, 1 Gbit/s": "gbit-26m",
}
NO = "–"

Results = dict[str, Measured]
Columns = dict[str, tuple[str, ...]]


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
    from _plots import PLOTS, draw  # needs matplotlib, which tests of the pages do not need

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
    if name in TABLES:
        lines = table(TABLES[name], results)
    else:
        lines = figures(*FIGURES[name], results) if name in FIGURES else BLOCKS[name](results)
    return "\n".join([*lines, ""]) if lines else ""


# ---- the machine and the method ----


def machine(results: Results) -> list[str]:
    """Return where and when the numbers were taken."""
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
    return [taken + "One thread a worker. Other machines have other milliseconds."]


def _card(one: Measured) -> str:
    card = one.content["machine"]
    return f"{card['cores']} cores of {card['cpu']} ({card['isa']}), Linux {card['kernel']}, " + (
        f"Python {card['python']}, torch {card['torch']}"
    )


# ---- tables ----


def overview(results: Results) -> list[str]:
    """Return the first table: windows, bytes, memory and errors of the base's variants."""
    launches = (*_LOOPBACK, *_GBIT, "truth", "memory")
    if not set(launches) <= set(results):
        return []
    columns = {"window, loopback": _LOOPBACK, "window, 1 Gbit/s": _GBIT}
    lines = _head("", *columns, "sent MB", "peak MB", "gradient error")
    for name in _OVERVIEW:
        one = first(results, name, _LOOPBACK)
        if one is None:
            continue
        windows = [_window(results, name, names) for names in columns.values()]
        sent = one.rows[name].get("sent_mb")
        lines.append(
            _line(_label(one, name), *windows, NO if sent is None else f"{sent:.1f}", *_kept(results, name))
        )
    links = ", ".join(_link(name, results[name]) for name in launches)
    return [*lines, _noise(columns, results, NO, NO, NO), "", f"Files: {links}."]


def _kept(results: Results, name: str) -> tuple[str, str]:
    memory, truth = results["memory"].rows.get(name, {}), results["truth"].rows.get(name, {})
    return (
        f"{memory['peak_mb']:.0f}" if "peak_mb" in memory else NO,
        f"{truth['error']:.0e}" if "error" in truth else NO,
    )


def table(columns: Columns, results: Results) -> list[str]:
    """Return a table of the windows of several launches; columns without a file are left out.

    A variant has a row if it was measured in at least half of the columns. The control has no row; the row of
    the noise takes its place.
    """
    columns = {title: names for title, names in columns.items() if names[0] in results}
    if not columns:
        return []
    lines = _head("", *(_link(title, results[names[0]]) for title, names in columns.items()))
    for name in (CONTROL[0], *_ROWS):
        found = first(results, name, [one for names in columns.values() for one in names])
        cells = [_window(results, name, names) for names in columns.values()]
        if found is not None and 2 * cells.count(NO) <= len(cells):
            lines.append(_line(_label(found, name), *cells))
    return [*lines, _noise(columns, results)]


def figures(columns: tuple[Column, ...], variants: tuple[str, ...], results: Results) -> list[str]:
    """Return a table with different figures of each variant, and the files of its launches."""
    launches = dict.fromkeys(name for column in columns for name in column.launches)
    if not set(launches) <= set(results):
        return []
    lines = _head("", *(column.title for column in columns))
    for name in variants or results[columns[0].launches[0]].rows:
        one = first(results, name, [*launches])
        if one is not None and name != CONTROL[1]:
            lines.append(_line(_label(one, name), *(_figure(column, name, results) for column in columns)))
    noise = [_noise_of(column.launches, results) if column.figure == "window" else NO for column in columns]
    links = ", ".join(_link(name, results[name]) for name in launches)
    return [*lines, _line("noise", *noise), "", f"Files: {links}."]


def _figure(column: Column, name: str, results: Results) -> str:
    if column.figure == "window":
        return _window(results, name, column.launches)
    one = first(results, name, column.launches)
    value = None if one is None else one.rows[name].get(column.figure)
    return NO if value is None else f"{value:.1f}" if column.figure == "sent_mb" else f"{value:.0f}"


def _window(results: Results, name: str, launches: tuple[str, ...]) -> str:
    """Return a window's time over the baseline's in the same launch; for the baseline, its time in ms."""
    found = first(results, name, launches)
    if found is None:
        return NO
    return f"{found.median(name):.0f} ms" if name == CONTROL[0] else f"{found.ratio(name, CONTROL[0]):.2f}"


def _noise(columns: Columns, results: Results, *others: str) -> str:
    """Return the row of the noise: the largest noise of each column's launches, and the other cells."""
    return _line("noise", *(_noise_of(names, results) for names in columns.values()), *others)


def _noise_of(launches: tuple[str, ...], results: Results) -> str:
    return f"{max(results[one].noise for one in launches if one in results):.0%}"


def _link(title: str, one: Measured) -> str:
    return f"[{title}](../benchmarks/results/{one.path.name})"


def _label(one: Measured, name: str) -> str:
    return f"**{one.label(name)}**" if one.is_ours(name) else one.label(name)


def ahead(results: Results) -> list[str]:
    """Return how many comparisons of equal bytes have a peer ahead by more than the noise, and why."""
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
    """Return the plot over sizes, workers and lengths of a window, and the files of the sizes."""
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
    "overview": overview,
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
