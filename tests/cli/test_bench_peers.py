"""One launch of `make bench` with a few variants: its result file, and the page with its numbers.

A launch whose file exists is not repeated. Speed is not asserted.
"""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
VARIANTS = ("floor", "no_sync_view", "no_sync_view_again", "engine", "engine_bf16")


def run(script: str, *arguments: str) -> str:
    done = forked.python(str(BENCHMARKS / script), *arguments, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_launch_writes_its_file_and_is_not_run_again(tmp_path):
    results = tmp_path / "results"
    launch = ("--only", "every-1", "--variants", ",".join(VARIANTS), "--rounds", "2", "--out", str(results))
    run("bench_peers.py", *launch)
    (file,) = results.glob("*-peers-every-1.json")
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == list(VARIANTS)
    assert all(len(row["times"]["window"]) == 2 for row in rows.values())
    assert f"{file.name} is there" in run("bench_peers.py", *launch)

    (tmp_path / "docs").mkdir()
    for other in ("wires", "sharded", "reproducible"):
        (tmp_path / "docs" / f"{other}.md").touch()
    page = tmp_path / "docs" / "numbers.md"
    page.write_text("<!-- numbers:begin windows -->\n<!-- numbers:end -->\n")
    run("render_numbers.py", "--results", str(results), "--root", str(tmp_path))
    written = page.read_text()
    assert "| **GradSync, bf16 wire** |" in written and file.name in written
