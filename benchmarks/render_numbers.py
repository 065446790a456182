"""Write tables of README.md and docs/numbers.md, and plots, from the newest files of `bench_peers.py`.

    python benchmarks/render_numbers.py

A page marks what is written here: between `numbers:begin NAME` and `numbers:end` stands what block NAME makes
of the files; where they are not all there, it stays as it is. tests/house/test_numbers.py holds pages and
plots to the files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from _ahead import LEAST_WINDOWS, Comparison, comparisons, explained
from _peer_results import CONTROL, Measured, first, newest
from _slopes import SLOPES, slope

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/numbers.md")
_BLOCK = re.compile(r"(<!-- numbers:begin (\S+) -->\n)(.*?)(<!-- numbers:end -->)", re.DOTALL)
_README = (
    *("ddp", "no_sync_view", "no_sync_view_again", "accelerate", "fabric", "trainer", "zero0", "zero1"),
    *("megatron", "fsdp2_deferred", "replicate_deferred", "no_sync_bf16", "no_sync_powersgd"),
    *("engine", "attach", "engine_bf16", "attach_bf16", "engine_int8_ef"),
    *("engine_exact_slots", "engine_shared", "attach_shared"),
)
_LOOPBACK = ("base", "wires", "deepspeed")
_GBIT = ("gbit", "gbit-wires", "gbit-deepspeed")
NO = "–"

Results = dict[str, Measured]


def main() -> None:
    """Write pages and plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the pages are")
    options = parser.parse_args()
    results = newest(options.results)
    for name in PAGES:
        page = options.root / name
        page.write_text(rendered(page.read_text(), results))
        print("wrote", page)
    from _plots import PLOTS, draw  # needs matplotlib, which tests of the pages do without

    for plot in PLOTS:
        if plot.figures(results):
            draw(plot, results, options.root / "docs")


def rendered(page: str, results: Results) -> str:
    """Return a page with every block that the files suffice for."""

    def block(match: re.Match[str]) -> str:
        begin, name, old, end = match.groups()
        return begin + (_made(name, results) or old) + end

    return _BLOCK.sub(block, page)


def _made(name: str, results: Results) -> str:
    if name.startswith("launch-"):
        lines = launch_table(results[name[7:]]) if name[7:] in results else []
    else:
        lines = BLOCKS[name](results)
    return "\n".join([*lines, ""]) if lines else ""


# ---- the machine and the method ----


def machine(results: Results) -> list[str]:
    """Say where and when the numbers were taken."""
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
    carried = (
        "One thread a worker. Other machines have other milliseconds: ratios, bytes and errors carry over."
    )
    return [taken + carried]


def _card(one: Measured) -> str:
    card = one.content["machine"]
    return f"{card['cores']} cores of {card['cpu']} ({card['isa']}), Linux {card['kernel']}, " + (
        f"Python {card['python']}, torch {card['torch']}, {card['malloc']}"
    ).replace("trimming off", "malloc keeps its pages")


def control(results: Results) -> list[str]:
    """Return what the control pair read in every launch."""
    lines = _head("launch", "second over first", "noise of a comparison", "windows")
    for one in _timed(results):
        if not set(CONTROL) <= set(one.rows):
            continue
        found = one.ratio(*reversed(CONTROL))
        num = len(one.rows[CONTROL[0]]["times"]["window"])
        title = f"`{one.launch['name']}`: {_title(one)}"
        lines.append(_line(title, f"{found:.2f}", f"{one.noise:.0%}", num))
    return lines if len(lines) > 2 else []


def _timed(results: Results) -> list[Measured]:
    return [one for one in results.values() if one.launch["kind"] == "time"]


def _title(one: Measured) -> str:
    about, launch = one.content["about"], one.launch
    size = f" of {about['parameters'] / 1e6:.1f} M" if launch["model"].startswith("gpt-") else ""
    num = launch["accumulate"]
    split = f"{num} micro-batch{'es' * (num > 1)}, {launch['world']} workers"
    return f"{about['work']}{size}, {split}, {about['network']}"


# ---- tables ----


def launch_table(one: Measured) -> list[str]:
    """Return all figures of a launch."""
    heads = ["window ms", "least", "±", "× floor", "exposed sync ms", "a micro-batch ms", "unscale + clip ms"]
    is_counted = any("collectives" in row for row in one.rows.values())
    lines = _head(_title(one), *heads, "sent MB", *(["collectives"] if is_counted else []))
    order = sorted(one.rows, key=lambda name: (name != "floor", one.is_ours(name), -one.median(name)))
    for name in order:
        lines.append(
            _line(_label(one, name), *_figures(one, name), *([_calls(one.rows[name])] if is_counted else []))
        )
    for name in one.content["missing"]:
        lines.append(_line(_label(one, name), "not installed", *[NO] * (len(heads) + is_counted)))
    file = f"../benchmarks/results/{one.path.name}"
    return [*lines, "", f"[File]({file}): `python benchmarks/bench_peers.py --only {one.launch['name']}`"]


def _figures(one: Measured, name: str) -> list[str]:
    row, is_floor = one.rows[name], name == "floor"
    early = one.by_micro_batch(name)
    return [
        f"{one.median(name):.0f}",
        f"{one.lowest(name):.0f}",
        f"{one.spread(name):.0%}",
        NO if is_floor else f"{one.ratio(name, 'floor'):.2f}",
        NO if is_floor else f"{one.exposed(name):.0f}",
        NO if is_floor or early is None else f"{early:.1f}",
        f"{one.median(name, 'epilogue'):.1f}" if "epilogue" in row["times"] else NO,
        f"{row['sent_mb']:.1f}" if "sent_mb" in row else NO,
    ]


def _calls(row: dict[str, int]) -> str:
    single = row.get("point_to_point", 0)
    return f"{row['collectives']}" + (f" + {single} sends and receives" if single else "")


def _label(one: Measured, name: str) -> str:
    return f"**{one.label(name)}**" if one.is_ours(name) else one.label(name)


def readme(results: Results) -> list[str]:
    """Return the README's table: windows as multiples of DDP + no_sync with views in the same launch."""
    columns = {"window, loopback": _LOOPBACK, "window, 1 Gbit/s": _GBIT}
    lines = _head("", *columns, "sent MB", "peak MB", "gradient error")
    if not {"base", "wires", "gbit", "gbit-wires", "truth", "memory"} <= set(results):
        return []
    for name in _README:
        one = first(results, name, _LOOPBACK)
        if one is None:
            continue
        windows = [
            f"{found.ratio(name, CONTROL[0]):.2f}" if (found := first(results, name, launches)) else NO
            for launches in columns.values()
        ]
        sent = one.rows[name].get("sent_mb")
        lines.append(
            _line(_label(one, name), *windows, NO if sent is None else f"{sent:.1f}", *_kept(results, name))
        )
    base, gbit = results["base"], results["gbit"]
    one, other = (f"{found.median(CONTROL[0]):.0f}" for found in (base, gbit))
    floors = " and ".join(f"{found.median('floor'):.0f}" for found in (base, gbit))
    note = (
        f"{_title(base)[:-10]}; median window as a multiple of that of DDP + `no_sync` with bucket views, "
        f"which takes {one} ms on loopback and {other} over 1 Gbit/s (without communication {floors}); what "
        f"a rank sends in a window; what its process holds at most; distance of a window's gradient from "
        f"float64's."
    )
    return [machine(results)[0], "", note, "", *lines]


def _kept(results: Results, name: str) -> tuple[str, str]:
    memory, truth = results["memory"].rows.get(name, {}), results["truth"].rows.get(name, {})
    return (
        f"{memory['peak_mb']:.0f}" if "peak_mb" in memory else NO,
        f"{truth['error']:.0e}" if "error" in truth else NO,
    )


def truth(results: Results) -> list[str]:
    """Return errors of gradients and losses at the end."""
    if "truth" not in results:
        return []
    one = results["truth"]
    lines = _head(_title(one), "gradient error", f"loss after {one.launch['rounds']} windows")
    for name, row in sorted(one.rows.items(), key=lambda item: item[1].get("error", -1)):
        error = f"{row['error']:.1e}" if "error" in row else NO
        lines.append(_line(_label(one, name), error, f"{row['end_loss']:.3f}"))
    return lines


def memory(results: Results) -> list[str]:
    """Return what a process holds at most."""
    if "memory" not in results:
        return []
    one = results["memory"]
    lines = _head(_title(one), "peak MB", "lowest and highest", "over the floor")
    floor = one.rows["floor"]["peak_mb"]
    for name, row in sorted(one.rows.items(), key=lambda item: item[1]["peak_mb"]):
        peak, peaks = row["peak_mb"], row["peaks_mb"]
        between = f"{min(peaks):.0f}–{max(peaks):.0f}"
        lines.append(_line(_label(one, name), f"{peak:.0f}", between, f"{peak - floor:+.0f}"))
    return lines


def growth(results: Results) -> list[str]:
    """Return the slopes of exposed sync over what grows."""
    columns = [
        one for one in SLOPES if all(any(n in results for n in names) for names in one.points.values())
    ]
    if not columns:
        return []
    lines = _head("exposed sync grows by", *(one.title for one in columns))
    for name in (
        "ddp",
        "no_sync_view",
        "no_sync_view_again",
        "accelerate",
        "engine",
        "attach",
        "engine_bf16",
    ):
        measured = first(results, name, list(results))
        if measured is None:
            continue
        values = [slope(results, name, one) for one in columns]
        label = _label(measured, name)
        lines.append(_line(label, *(NO if value is None else f"{value:.1f}" for value in values)))
    return lines


def ahead(results: Results) -> list[str]:
    """Return the comparisons of the same bytes in which a peer was ahead by more than the noise, and why."""
    found = comparisons(results)
    if not found:
        return []
    lost = [one for one in found if one.is_lost]
    won = sum(one.is_won for one in found)
    said = f"Of {len(found)} comparisons with a peer that sends the same, in launches of {LEAST_WINDOWS} "
    said += f"windows or more, pyengine is ahead in {won} by more than the noise of their launch, a peer in "
    said += f"{len(lost)}; the others are level."
    if not lost:
        return [said]
    lines = [_line("", "ours", "takes so many times as long as", "noise", "why"), "|---|---|---|---:|---|"]
    alike: dict[tuple[str, str, str], list[Comparison]] = {}
    for one in lost:
        alike.setdefault((one.launch, one.ours, explained(one)), []).append(one)
    for (launch, ours, why), behind in alike.items():
        measured = results[launch]
        peers = "; ".join(f"{one.ratio:.2f} × {measured.label(one.peer)}" for one in behind)
        lines.append(_line(_title(measured), _label(measured, ours), peers, f"{measured.noise:.0%}", why))
    return [said, "", *lines]


def plot(results: Results) -> list[str]:
    """Return the README's picture."""
    if not {"gbit", "gbit-wires"} <= set(results):
        return []
    return [f"![What synchronisation adds to a window, {_title(results['gbit'])}](docs/numbers.svg)"]


def growth_plot(results: Results) -> list[str]:
    """Return the picture of `growth`."""
    return (
        ["![Exposed sync over parameters, accumulation and workers](numbers-growth.svg)"]
        if growth(results)
        else []
    )


BLOCKS: dict[str, Callable[[Results], list[str]]] = {
    "machine": machine,
    "control": control,
    "readme": readme,
    "plot": plot,
    "truth": truth,
    "memory": memory,
    "growth": growth,
    "growth-plot": growth_plot,
    "ahead": ahead,
}


def _head(first_column: str, *columns: str) -> list[str]:
    return [_line(first_column, *columns), "|---|" + "---:|" * len(columns)]


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
