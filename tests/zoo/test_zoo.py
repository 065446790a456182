"""Every bug of the zoo is silent by itself, and the audit names it within one window."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import pyengine as pe

BUGS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("habitat", "test_zoo"))
PAGE = HERE.parents[1] / "docs" / "reliability.md"


def _run(name: str) -> tuple[pe.AuditError, float]:
    """Return the audit's error for a bug, and the relative error of the numbers without an audit."""
    bug = importlib.import_module(name)
    with pytest.raises(pe.AuditError) as found:
        bug.train(pe.audit)
    outcome = bug.train(Mock())  # an audit that does nothing
    return found.value, float((outcome.got - outcome.due).norm() / outcome.due.norm())


@pytest.mark.parametrize("name", BUGS)
def test_the_audit_names_it_on_every_rank_where_numbers_are_wrong_in_silence(ranks, name):
    bug = importlib.import_module(name)
    errors, off = zip(*ranks(getattr(bug, "WORLD", 2)).run(_run, name), strict=True)
    first, *others = errors
    assert all(str(other) == str(first) and other.findings == first.findings for other in others)
    finding = first.findings[0]
    what, named, wrong, cause = bug.FOUND
    assert (finding.what, finding.names[:1] or ("",), finding.ranks) == (what, (named,), wrong)
    assert finding.cause.startswith(cause)
    assert finding.step - finding.since <= 1
    assert max(off) > 0.01


def test_the_page_has_every_bug_of_a_project_in_the_words_of_the_zoo():
    _, _, rest = PAGE.read_text().partition("| bug | where |\n|---|---|\n")
    rows = rest.partition("\n\n")[0].splitlines()
    bugs = [importlib.import_module(name) for name in BUGS]
    due = [f"| {bug.BUG} | {bug.THREAD} |" for bug in bugs if not bug.THREAD.startswith("a class: ")]
    assert sorted(rows) == sorted(due)
