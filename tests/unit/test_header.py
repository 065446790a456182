"""The header: what ranks learn about each other's windows."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.comm import Local
from pyengine.window.digest import HeaderDigest
from pyengine.window.header import MAX_COUNT, Header, LocalWindow, SharedBatch, Totals, checked_count

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def _header(
    counts: list[Any], *, loss: float = 0.0, is_exact: bool = False, most: float = INF, **changes: Any
) -> Header:
    """Return the header of a rank with these counts; every micro-batch has the same loss."""
    local = LocalWindow(is_exact, most)
    for count in counts:
        local.append(torch.tensor(loss), count)
    said = {"position": (5, 4), "has_more": False, "digest": HeaderDigest("sends", "one")}
    return Header(Local(), CPU, local=local, **{**said, **changes})


def _totals(*headers: Header) -> Totals:
    """Return the totals that the ranks of these headers read."""
    return Totals.of(sum(header.vector() for header in headers).tolist(), len(headers))


def test_the_header_of_another_window_of_a_graph_knows_nothing_of_the_first():
    first = _header([1])
    first.totals()
    first.disagreement = "ranks differ"
    second = first.again(
        local=LocalWindow(), position=(6, 5), has_more=False, digest=HeaderDigest("sends", "one")
    )
    assert (second.disagreement, second.known_totals) == ("", None)


@pytest.mark.parametrize("world", [1, 3])
def test_counts_losses_and_micro_batches_are_summed(world):
    headers = [_header([2, torch.tensor(0.5)], loss=rank + 0.25, has_more=rank < 2) for rank in range(world)]
    totals = _totals(*headers)
    assert (totals.count, totals.micro_batches) == (2.5 * world, 2 * world)
    assert totals.loss == 2 * sum(rank + 0.25 for rank in range(world))
    assert (totals.invalid_counts, totals.more, totals.differ) == (0, min(world, 2), False)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"position": (6, 4)},
        {"position": (5, 3)},
        {"digest": HeaderDigest("sends", "two")},
        {"digest": HeaderDigest("ends", "one")},
    ],
    ids=str,
)
def test_one_rank_with_other_claims_is_found(world, changes):
    assert _totals(_header([1], **changes), *[_header([1])] * (world - 1)).differ


# A count, whether any sum accepts it, and whether an exact sum accepts it.
COUNTS = [(0, True, True), (3, True, True), (0.5, True, False), (MAX_COUNT, True, True)]
COUNTS += [(2 * MAX_COUNT, False, False), (-1, False, False), (NAN, False, False), (INF, False, False)]


@pytest.mark.parametrize("wrap", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize(("count", "any_sum", "exact_sum"), COUNTS)
def test_an_invalid_count_is_left_out_and_reported(wrap, count, any_sum, exact_sum):
    for is_exact, is_valid in ((False, any_sum), (True, exact_sum)):
        header = _header([1, wrap(count)], is_exact=is_exact)
        totals = _totals(header)
        assert totals.invalid_counts == (not is_valid)
        assert totals.count == (1 + count if is_valid else 1)
        assert bool(header.forbids()) is not is_valid


@pytest.mark.parametrize(("num", "end"), [(8, "1, 1]"), (9, "1, ...]")])
def test_a_description_has_the_first_eight_counts(num, end):
    local = LocalWindow()
    for _ in range(num):
        local.append(None, 1)
    assert local.described().endswith(end)


@pytest.mark.parametrize(
    ("counts", "most", "inv_count", "forbids"),
    [([4], INF, 0.25, False), ([], INF, 0.0, True), ([0], INF, 0.0, True), ([1, 3], 1, 0.25, True)],
)
def test_a_window_without_items_or_with_too_many_micro_batches_may_not_be_used(
    counts, most, inv_count, forbids
):
    header = _header(counts, most=most)
    assert (float(header.inv_count()), bool(header.forbids())) == (inv_count, forbids)


@pytest.mark.parametrize("count", [3, 0.5, torch.tensor(2), torch.tensor([[7.0]]), INF])
def test_one_number_is_a_count_and_one_beyond_any_float_is_infinite(count):
    assert checked_count(count) is count
    assert checked_count(10**400) == INF


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (torch.ones(2), ValueError),
        (torch.empty(0), ValueError),
        (torch.tensor(True), TypeError),
        (True, TypeError),
        ("8", TypeError),
        (1j, TypeError),
    ],
    ids=str,
)
def test_what_is_no_number_is_refused_before_anything_runs(count, error):
    with pytest.raises(error, match=r"^count"):
        checked_count(count)


MICRO_BATCH = st.tuples(st.integers(0, 2**20), st.booleans())  # count, on a device


@settings(max_examples=30, deadline=None)
@given(
    windows=st.lists(st.lists(MICRO_BATCH, max_size=5), min_size=1, max_size=4),
    sharing=st.integers(1, 3),
    speaker=st.integers(0, 2),
)
def test_every_micro_batch_counts_once_whoever_has_how_many_and_shares_them(windows, sharing, speaker):
    """Each window belongs to one batch, which `sharing` ranks compute and one of these ranks counts."""
    headers = []
    for index, window in enumerate(windows):
        for rank in range(sharing):
            batch = SharedBatch(index, sharing, rank == speaker % sharing)
            local = LocalWindow(batch=batch if sharing > 1 else None)
            for count, is_far in window:
                local.append(torch.tensor(1.0), torch.tensor(count) if is_far else count)
            said = {"position": (5, 4), "has_more": False, "digest": HeaderDigest("sends", "one")}
            headers.append(Header(Local(), CPU, local=local, **said))
    totals = _totals(*headers)
    counts = [count for window in windows for count, _ in window]
    assert (totals.count, totals.loss) == (sum(counts), len(counts))
    assert totals.micro_batches == len(counts)
    assert not (totals.differ or totals.batches_differ)


@pytest.mark.parametrize("is_read", [True, False])
def test_nothing_counted_is_divided_by_nothing(is_read):
    with mock.patch("pyengine.window.header._host_may_look", lambda *_: is_read):
        assert _header([0, 0]).inv_count() == 0
        assert _header([1, 3]).inv_count() == 0.25
