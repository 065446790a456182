"""The table of docs/reliability.md shows the newest result file."""

from __future__ import annotations

import json

import pytest
import write_table


def test_the_page_shows_the_newest_result_file():
    results = sorted(write_table.RESULTS.glob("*-faults.json"))
    if not results:
        pytest.skip("the sdist has no result files")
    rows = json.loads(results[-1].read_text())["rows"]
    assert write_table.parts(write_table.PAGE.read_text())[1] == write_table.table(rows)


def test_tries_of_several_processes_are_added_up():
    row = {"fault": "f", "made_by": "m", "tries": 2, "outcome": "o"}
    other = {**row, "outcome": "another"}
    assert write_table.merged([row, other, row]) == [other, {**row, "tries": 4}]
