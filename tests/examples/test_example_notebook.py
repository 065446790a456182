"""The notebooks are stored with outputs; their cells run in order, even if `__main__` is not a file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
MAX_BYTES = 300_000
_OF_A_MACHINE = re.compile(r"(?:^|[\s'\"(=])/\w+/|Warning|Traceback")


def _code_cells(name: str) -> list[dict[str, Any]]:
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _run(name: str, folder: Path, **shorter: str) -> str:
    """Run the cells, with smaller values of some command-line options; return the output."""
    code = "\n\n".join("".join(cell["source"]) for cell in _code_cells(name))
    for option, value in shorter.items():
        code, found = re.subn(rf"--{option} [\d,]+", f"--{option} {value}", code)
        assert found == 1
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_small_and_stored_as_it_ran(name):
    assert (EXAMPLES / name).stat().st_size < MAX_BYTES
    cells = _code_cells(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        source = "".join(cell["source"])
        assert ("print(" not in source and "plt.show" not in source) or cell["outputs"], source
        assert ("plt.show" in source) == any("image/png" in each.get("data", {}) for each in cell["outputs"])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_outputs_of_a_notebook_have_no_paths_and_no_warnings(name):
    outputs = [output for cell in _code_cells(name) for output in cell["outputs"]]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    texts = [output.get("text") or output["data"].get("text/plain", []) for output in outputs]
    lines = [line for text in texts for line in text]
    assert lines and [line for line in lines if _OF_A_MACHINE.search(line)] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_page_of_the_examples_links_a_notebook(name):
    assert f"| [{name}]({name}) |" in (EXAMPLES / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers of a notebook are forked")
def test_the_quick_start_trains_two_workers(tmp_path):
    out = _run("quickstart.ipynb", tmp_path)
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == ["step 0", "step 10", "step 20", "step 29"]
    assert "2 collectives, " in out  # the header and the bucket


@pytest.mark.slow
def test_the_scaling_study_compares_one_and_two_workers(tmp_path):
    out = _run("scaling_study.ipynb", tmp_path, batch="128", epochs="1", repeats="1")
    assert out.startswith("2 runs in 2 cells\n")
    compared = [line for line in out.splitlines() if line.startswith("2 workers, batch ")]
    assert [line.partition(":")[0] for line in compared] == ["2 workers, batch 128"]
    assert (tmp_path / "scaling-study" / "report.html").exists()
