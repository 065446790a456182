"""Turn the records of campaigns into a result file and the table of docs/reliability.md.

`make faults` runs it: `python tests/faults/write_table.py build/faults.jsonl`.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "reliability.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- faults: written by make faults -->\n", "<!-- end of faults -->\n"
# Many outcomes end with this text; the page states it once.
SHARED = "; parameters have the bits of the steps that were taken"
Row = Mapping[str, Any]


def merged(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return one row per (fault, made_by, outcome), with the tries of several processes added up."""
    tries: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = row["fault"], row["made_by"], row["outcome"]
        tries[key] = tries.get(key, 0) + row["tries"]
    return [
        {"fault": fault, "made_by": made_by, "tries": number, "outcome": outcome}
        for (fault, made_by, outcome), number in sorted(tries.items())
    ]


def table(rows: Iterable[Row]) -> str:
    """Return the page's table, which lists the faults of each outcome."""
    by_outcome: dict[str, dict[str, int]] = {}
    for row in rows:
        tries = by_outcome.setdefault(row["outcome"].removesuffix(SHARED), {})
        tries[row["fault"]] = tries.get(row["fault"], 0) + row["tries"]
    lines = ["| what happened | after (tries) |", "|---|---|"]
    for outcome, tries in by_outcome.items():
        faults = "; ".join(f"{fault} ({number})" for fault, number in tries.items())
        lines.append(f"| {outcome} | {faults} |")
    return "".join(f"{line}\n" for line in lines)


def parts(page: str) -> tuple[str, str, str]:
    """Return the text before the table, the table, and the text after it."""
    before, _, rest = page.partition(BEGIN)
    old, _, behind = rest.partition(END)
    return before, old, behind


def main(path: str) -> None:
    rows = merged(json.loads(line) for line in Path(path).read_text().splitlines())
    result = RESULTS / f"{datetime.date.today()}-faults.json"
    result.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    before, _, behind = parts(PAGE.read_text())
    PAGE.write_text(before + BEGIN + table(rows) + END + behind)
    print(table(rows) + f"wrote {result.relative_to(ROOT)} and the table of {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1])
