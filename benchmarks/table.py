"""Print result files as the Markdown tables of docs: python benchmarks/table.py [FILE ...].

Without arguments: the newest file of every kind under `results/`.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _cuda import COPY, OURS
from _harness import RESULTS

_DATED = re.compile(r"\d{4}-\d{2}-\d{2}-(.+)\.json")


def newest() -> list[Path]:
    """Return the last file of every kind; names begin with the date."""
    kinds: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*.json")):
        match = _DATED.fullmatch(path.name)
        if match:
            kinds[match[1]] = path
    return list(kinds.values())


def tables(content: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the tables of a result file as rows of Markdown."""
    if "cases" in content:
        yield from _step_tables(content["cases"])
    if "rows" not in content:
        return
    if isinstance(content["rows"], dict):
        yield _named_table(content["rows"])
    elif "yardstick" in content:
        yield _cuda_table(content["rows"])
        yield _many_tensors_table(content["rows"])
    elif "roof_bytes" in content:
        yield _chain_table(content["rows"])
    else:
        yield _kernel_table(content["rows"])


def _step_tables(cases: dict[str, Any]) -> Iterator[list[str]]:
    is_timed = any("window_p50_ms" in row for rows in cases.values() for row in rows.values())
    key = "window_p50_ms" if is_timed else "peak_mb"
    names = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    lines = _head(key, *cases)
    for name in names:
        values = (rows.get(name, {}).get(key, float("nan")) for rows in cases.values())
        lines.append(_line(name, *(f"{value:.0f}" if value >= 10 else f"{value:.2f}" for value in values)))
    yield lines
    for case, rows in cases.items():
        if any("host_p50_ms" in row for row in rows.values()):
            yield _device_table(case, rows)


def _device_table(case: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """Windows on a device that the host runs ahead of, and why what is missing is missing."""
    columns = ("window_p50_ms", "host_p50_ms", "launches", "copies", "waits", "peak_mb", "graph_p50_ms")
    lines = _head(case, *columns, "")
    for name, row in rows.items():
        figures = (f"{row[key]:.4g}" if key in row else "" for key in columns)
        why = (row[key] for key in ("failed", "not_counted", "no_graph") if key in row)
        lines.append(_line(name, *figures, "; ".join(why)))
    return lines


def _kernel_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = _head("one thread", "× roof", "× torch")
    return lines + [
        _line(row["case"], f"{row['times_roof']:.2f}", f"{row['times_torch']:.1f}") for row in rows
    ]


def _named_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = _head("", *next(iter(rows.values())))
    for name, row in rows.items():
        values = (f"{value:.4g}" if isinstance(value, float) else value for value in row.values())
        lines.append(_line(name, *values))
    return lines


def _chain_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = _head("one thread", "contestant", "bytes an element", "p50 ms", "of copy")
    for row in rows:
        for name, mine in row["contestants"].items():
            figures = mine["bytes_an_element"], f"{mine['p50_ms']:.2f}", f"{mine['share_of_copy']:.0%}"
            lines.append(_line(row["case"], name, *figures))
    return lines


def _cuda_table(rows: list[dict[str, Any]]) -> list[str]:
    """Median on the device and share of the copy rate, then how many times longer every other contestant
    takes.
    """
    others = list(
        dict.fromkeys(name for row in rows for name in row["contestants"] if name not in (OURS, COPY))
    )
    lines = _head("case", "µs", "GB/s", "of copy", *(f"× {name}" for name in others))
    for row in rows:
        ours = row["contestants"][OURS]
        times = (row["contestants"].get(name, {}).get("p50_us") for name in others)
        ratios = ("" if time is None else f"{time / ours['p50_us']:.2f}" for time in times)
        figures = f"{ours['p50_us']:.1f}", f"{ours['gb_per_s']:.0f}", f"{ours['share_of_copy']:.1%}"
        lines.append(_line(row["case"], *figures, *ratios))
    return lines


def _many_tensors_table(rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds above the launch floor: on the device alone,
    and from an idle stream with the host's part.
    """
    lines = _head("above the launch floor, µs", "contestant", "device", "with the host")
    for row in rows:
        for name, mine in row["contestants"].items():
            if "1000" in row["case"] and name != COPY:
                figures = f"{mine['above_floor_us']:.1f}", f"{mine['idle_above_floor_us']:.1f}"
                lines.append(_line(row["case"], name, *figures))
    return lines


def _head(first: str, *columns: str) -> list[str]:
    return [_line(first, *columns), "|---|" + "---:|" * len(columns)]


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or newest()):
        content = json.loads(path.read_text())
        print(f"{path.name}: {json.dumps(content['machine'])}")
        if "yardstick" in content:
            print({name: round(value, 1) for name, value in content["yardstick"].items()})
        for table in tables(content):
            print("", *table, "", sep="\n")
