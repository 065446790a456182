"""Thousands of random windows: each equals its reference, bit for bit, and nothing is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from soak_cases import Soaked, soak
from soak_held import Held
from soak_plan import Soak

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from campaign import record

# How much more a process may hold later: what an engine holds depends on its last window (with 8 buckets 127
# to 330 tensors, up and down over 1600 windows).
MORE_OBJECTS, MORE_TENSORS = 80, 240
MORE_BYTES = 8 * 2**20
WITHIN_S = 600

# owner, accumulator, number of windows by world size
WINDOWS = [
    ("own", "fp32", {1: 1200, 2: 1600, 3: 1200, 4: 800}),
    ("own", "native", {1: 600, 2: 1200, 3: 800, 4: 400}),
    ("own", "exact", {1: 400, 2: 800, 3: 600, 4: 400}),
    ("ddp", "fp32", {1: 600, 2: 1200, 3: 800, 4: 400}),
    ("ddp", "native", {2: 800, 3: 600}),
    ("ddp", "exact", {2: 600, 3: 400}),
    ("experts", "fp32", {2: 600, 3: 600, 4: 400}),
    ("experts", "native", {3: 400}),
    ("experts", "exact", {3: 400}),
    ("nested", "fp32", {1: 200, 2: 400, 3: 200, 4: 100}),
    ("nested", "native", {2: 200}),
    ("nested", "exact", {2: 200}),
    ("flat", "fp32", {3: 200}),
    ("hsdp", "fp32", {2: 200, 4: 100}),
    ("replicate", "fp32", {1: 100, 2: 200, 3: 100}),
]
CAMPAIGN = [
    Soak(owner, accumulator, world, windows)
    for owner, accumulator, by_world in WINDOWS
    for world, windows in by_world.items()
]
SHORT = [
    Soak("own", "fp32", 3, 100),
    Soak("own", "native", 2, 60),
    Soak("ddp", "fp32", 2, 80),
    Soak("experts", "exact", 3, 40),
    Soak("nested", "fp32", 2, 40),
    Soak("hsdp", "fp32", 4, 20),
]


def _id(case: Soak) -> str:
    return f"{case.owner} {case.accumulator} {case.world}"


def _assert_no_more(then: Held, now: Held, case: Soak, rank: int) -> None:
    more = {name: value - getattr(then, name) for name, value in vars(now).items()}
    allowed = {"objects": MORE_OBJECTS, "tensors": MORE_TENSORS, "rss": MORE_BYTES}
    too_much = {name: number for name, number in more.items() if number > allowed.get(name, 0)}
    assert not too_much, (rank, too_much, then, now)


def _soaked(ranks, case: Soak) -> list[Soaked]:
    """Run a case, which checks every window; check that nothing has grown; return each rank's report."""
    ends = ranks(case.world).ends(WITHIN_S, soak, case)
    for rank, end in enumerate(ends):
        assert isinstance(end.value, Soaked), f"rank {rank}: {end}\n{end.error}"
    reports = [end.value for end in ends]
    assert len({each.windows for each in reports}) == 1
    for rank, each in enumerate(reports):
        early, half, *alone, end = each.held
        for then, now in ((early, half), (half, end), alone):
            _assert_no_more(then, now, case, rank)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORT, ids=_id)
def test_every_window_equals_its_reference_whatever_goes_wrong(ranks, case):
    _soaked(ranks, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CAMPAIGN, ids=_id)
def test_thousands_of_windows_equal_their_reference_and_leave_nothing(ranks, case):
    reports = _soaked(ranks, case)
    record(
        fault="the soak",
        made_by="random windows on 1 to 4 ranks, every owner of gradients: exceptions in every phase, early "
        "ends, abandoned windows, inf and nan",
        tries=reports[0].windows,
        outcome="every window equals that of one process, bit for bit, and nothing is left over",
    )
