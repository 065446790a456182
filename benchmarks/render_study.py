"""Write the measured part of docs/study.md, and its plots, from the newest result file of `study`.

    python -m pyengine study --batch 32,128 --epochs 3
    python benchmarks/render_study.py --save study/runs.jsonl

Without `--save`, the newest file of benchmarks/results/ is rendered again. tests/house/test_numbers.py
compares the page and the plots with the file.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pyengine.cli.noise import duration, percent
from pyengine.cli.study.analysis import Analysis, analyse, recommend
from pyengine.cli.study.store import Record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = Path("docs/study.md")
# Plots of `study`, and their files in docs/.
PLOTS = {
    "speed_up": "study-speed-up.svg",
    "throughput": "study-throughput.svg",
    "heat_map": "study-cells.svg",
    "accuracy_over_time": "study-accuracy.svg",
    "resources": "study-resources.svg",
}
BUSY = 0.1  # share of the machine that other programs used before a run
_BLOCK = re.compile(r"(<!-- study:begin -->\n)(.*?)(<!-- study:end -->)", re.DOTALL)


def main() -> None:
    """Write the page and the plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, metavar="RUNS", help="keep this runs.jsonl as the newest result")
    options = parser.parse_args()
    if options.save is not None:
        shutil.copyfile(options.save, RESULTS / f"{datetime.date.today()}-study.jsonl")
    path = newest()
    page = ROOT / PAGE
    page.write_text(rendered(page.read_text(), path))
    print("wrote", page)
    from pyengine.cli.study.plots import draw  # imports matplotlib, which tests of the page do not need

    with tempfile.TemporaryDirectory() as folder:
        for plot in draw(read(path)[2], Path(folder), suffix=".svg"):
            if plot.path.stem in PLOTS:
                text = plot.path.read_text()
                (ROOT / "docs" / PLOTS[plot.path.stem]).write_text(f"{text}{digest(path)}\n")
                print("wrote", ROOT / "docs" / PLOTS[plot.path.stem])


def newest() -> Path:
    """Return the newest result file."""
    return max(RESULTS.glob("*-study.jsonl"))


def read(path: Path) -> tuple[dict[str, Any], list[Record], Analysis]:
    """Return the settings, runs and figures of a result file."""
    header, *lines = map(json.loads, path.read_text().splitlines())
    runs = [Record(**{name: value for name, value in line.items() if name != "event"}) for line in lines]
    records = list({record.key: record for record in runs}.values())
    cores = header["machine"]["cores"]
    analysis = analyse(records, fixed=header["fixed"], threads=header["threads"], cores=cores, goal=None)
    return header, records, analysis


def digest(path: Path) -> str:
    """Return the last line of the plots of a result file."""
    return f"<!-- study: {hashlib.sha256(path.read_bytes()).hexdigest()[:16]} -->"


def rendered(page: str, path: Path) -> str:
    """Return the page, with its measured part from a result file."""
    return _BLOCK.sub(lambda block: block[1] + _measured(path) + block[3], page)


def _measured(path: Path) -> str:
    header, records, analysis = read(path)
    machine = header["machine"]
    busy = sum(record.busy > BUSY for record in records)
    taken = (
        f"[Taken](../benchmarks/results/{path.name}) on {path.name[:10]} on {machine['cores']} cores of "
        f"{machine['cpu']}: {len(records)} runs in {duration(sum(record.wall_s for record in records))}, "
        f"{busy} of which began while other programs used more than {percent(BUSY)}."
    )
    noisy = [figures.is_within_noise for cell, figures in analysis.cells.items() if cell.workers > 1]
    found = f"Within noise of one worker: {sum(noisy)} of {len(noisy)} cells. Stalls: {len(analysis.stalls)}."
    pictures = [f"![{name.replace('_', ' ')}]({file})" for name, file in PLOTS.items()]
    parts = [taken, f"{recommend(analysis).text} {found}", *pictures]
    return "\n\n".join(parts).replace("\u00a0", " ") + "\n"


if __name__ == "__main__":
    main()
