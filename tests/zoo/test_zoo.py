"""Every bug of the zoo is silent by itself, and the audit names it within one window."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import habitat

import pyengine as pe

BUGS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("habitat", "test_zoo"))
PAGE = HERE.parents[1] / "docs" / "reliability.md"
MOST_LINES = 40


def _bug(name: str) -> Any:
    return importlib.import_module(name)


def _world(name: str) -> int:
    return getattr(_bug(name), "WORLD", 2)


@pytest.fixture
def seen(ranks):
    """Give what became of a bug, by rank; all bugs of a world have run together, once."""

    def of(name):
        world = _world(name)
        if world not in _SEEN:
            _SEEN[world] = ranks(world).run(_run, [bug for bug in BUGS if _world(bug) == world])
        return [rank[name] for rank in _SEEN[world]]

    return of


@dataclass(frozen=True)
class _Seen:
    """What the audit said of a bug on one rank, and how far off the numbers are without it."""

    error: pe.AuditError | None
    off: float


_SEEN: dict[int, list[dict[str, _Seen]]] = {}


def _run(names: list[str]) -> dict[str, _Seen]:
    return {name: _Seen(_audited(name), _unaudited(name)) for name in names}


def _audited(name: str) -> pe.AuditError | None:
    try:
        _bug(name).train(pe.audit)
    except pe.AuditError as error:
        return error
    return None


def _unaudited(name: str) -> float:
    outcome = _bug(name).train(Mock())  # an audit that does nothing
    return float((outcome.got - outcome.due).norm() / outcome.due.norm())


@pytest.mark.parametrize("name", BUGS)
def test_the_audit_names_it_on_every_rank_where_numbers_are_wrong_in_silence(seen, name):
    first, *others = [rank.error for rank in seen(name)]
    assert first is not None
    assert all(str(other) == str(first) and other.findings == first.findings for other in others)
    finding = first.findings[0]
    what, named, wrong, cause = _bug(name).FOUND
    assert (finding.what, finding.names[:1] or ("",), finding.ranks) == (what, (named,), wrong)
    assert finding.cause.startswith(cause)
    assert finding.step - finding.since <= 1
    assert max(rank.off for rank in seen(name)) > 0.01


def test_a_bug_is_short_enough_to_be_read():
    assert max(len((HERE / f"{name}.py").read_text().splitlines()) for name in BUGS) <= MOST_LINES


def test_the_page_has_every_bug_of_a_project_in_the_words_of_the_zoo():
    _, _, rest = PAGE.read_text().partition("| bug | where |\n|---|---|\n")
    rows = rest.partition("\n\n")[0].splitlines()
    bugs = [_bug(name) for name in BUGS]
    due = [f"| {bug.BUG} | {bug.THREAD} |" for bug in bugs if not bug.THREAD.startswith("a class: ")]
    assert sorted(rows) == sorted(due)


def test_a_clean_window_raises_no_alarm(ranks):
    assert ranks(2).run(_clean) == [None, None]


def _clean() -> None:
    model = habitat.net()
    optimizer = habitat.sgd(model)
    audit = pe.audit(model, optimizer, every=1)
    for _ in range(3):
        for x in habitat.mine(2, 5):
            (model(x) / 2).backward()
        habitat.average_(model.parameters())
        audit.reduced()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    audit.remove()
