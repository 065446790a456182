"""A fault on one rank, in any phase of a window, ends on every rank as the table in `fault_cases.py` says."""

from __future__ import annotations

from collections import Counter

import pytest
from campaign import record
from fault_cases import DEADLY, IN_WORDS, TABLE, Case, drawn
from fault_outcomes import ENDS, Outcome
from fault_scenario import train
from marks import rest

# No rank waits for another rank longer than the group's timeout; the margin allows for a busy machine.
MARGIN_S = 25


@pytest.fixture(scope="module")
def ended():
    """Return a counter of (fault, end) pairs; record its counts after the module's tests."""
    counts: Counter[tuple[str, str]] = Counter()
    yield counts
    for (fault, end), tries in counts.items():
        record(
            fault=fault,
            made_by="on one rank of 2 to 4, in every phase and way in (`tests/faults/test_faults.py`)",
            tries=tries,
            outcome=f"{IN_WORDS[end]}; parameters have the bits of the steps that were taken",
        )


def _id(case: Case) -> str:
    return f"{case} -> {case.end}"


def _param(case: Case) -> object:
    is_first = case.fault in DEADLY and not case.is_rest
    later = pytest.mark.slow if is_first else pytest.mark.exhaustive
    is_long = case.is_slow or (case.fault == "late" and case.way != "GradSync")
    return pytest.param(case, id=_id(case), marks=[later] if is_long else [])


@pytest.mark.parametrize("case", [_param(case) for case in TABLE])
def test_a_fault_ends_on_every_rank_as_the_table_says(ranks, ended, case):
    ENDS[case.end](Outcome(case, ranks(case.world).ends(case.group_s + MARGIN_S, train, case)))
    ended[case.fault, case.end] += 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [*drawn(12, seed=12), *rest(*drawn(60, seed=13))], ids=_id)
def test_a_fault_at_a_random_place_ends_as_the_table_says(ranks, ended, case):
    ENDS[case.end](Outcome(case, ranks(case.world).ends(case.group_s + MARGIN_S, train, case)))
    ended[case.fault, case.end] += 1
