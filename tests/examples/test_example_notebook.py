"""The notebook's cells run in order, in an interpreter whose `__main__` is no file, as in Jupyter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers of a notebook are forked")
def test_the_notebook_trains_two_workers(tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == ["step 0", "step 10", "step 20", "step 29"]
    assert "3 collectives, " in done.stdout  # the header, the bucket, the used flags
