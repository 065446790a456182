"""No tracked file holds what git leaves behind where two changes meet and nobody has chosen."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A line of seven signs alone underlines a title as well: it counts only beside one of the others.
_SIDE = re.compile(rb"^(?:<{7}|\|{7}|>{7})(?: .*)?\r?$", re.MULTILINE)
_MARKER = re.compile(rb"^(?:<{7}|\|{7}|={7}|>{7})(?: .*)?\r?$", re.MULTILINE)


def _markers(content: bytes) -> list[int]:
    """Return the lines with a marker."""
    if not _SIDE.search(content):
        return []
    return [content.count(b"\n", 0, match.start()) + 1 for match in _MARKER.finditer(content)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\n<" + "<<<<<< HEAD\ntwo\n=======\nthree\n>" + ">>>>>> join\n", [2, 4, 6]),
        ("|" + "|||||| base\r\n=======\r\n", [1, 2]),
        ("Title\n=======\n", []),
        ("| a row |\n", []),
    ],
)
def test_markers_are_told_from_underlined_titles(text, lines):
    assert _markers(text.encode()) == lines


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so nobody merges here")
def test_no_tracked_file_holds_a_conflict_marker():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    found = {str(path.relative_to(ROOT)): _markers(path.read_bytes()) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}
