"""Results of long fault campaigns: one JSON line each, collected by `make faults`."""

from __future__ import annotations

import json
import os
from pathlib import Path


def record(*, fault: str, made_by: str, tries: int, outcome: str) -> None:
    """Append a row to the file that PYENGINE_FAULTS_RESULTS names; do nothing if it is not set.

    Args:
        fault: what went wrong.
        made_by: how the fault was produced.
        tries: how many times it was produced.
        outcome: what happened, and what was lost.
    """
    path = os.environ.get("PYENGINE_FAULTS_RESULTS")
    if path:
        row = {"fault": fault, "made_by": made_by, "tries": tries, "outcome": outcome}
        with Path(path).open("a", encoding="utf-8") as results:
            results.write(json.dumps(row) + "\n")
