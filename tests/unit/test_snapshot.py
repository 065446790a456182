"""How the snapshots of several ranks become one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pyengine.checkpoint.snapshot import Identity, Snapshot, disjoint, in_order, merge
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

TERMS, NUMEL = 8, 64
CPU = torch.device("cpu")


def _snapshot(rank: int, *places: int, **changes: Any) -> Snapshot:
    """Return a rank's part of a window, whose micro-batches have counts and losses of their own."""
    return Snapshot(
        window=3,
        steps=2,
        rank=rank,
        world_size=4,
        identity=Identity("exact", TERMS, 0, []),
        places=list(places),
        counts=[10.0 + place for place in places],
        losses=[20.0 + place for place in places],
        **changes,
    )


# Places by rank; then whose snapshots are kept, the largest first.
KEPT = [
    ([], []),
    ([()], []),
    ([(0,), (1,)], [0, 1]),
    ([(0,), ()], [0]),
    ([(0,), (0, 1)], [1]),  # the larger one holds the other's
    ([(0, 1), (1, 2), (3,)], [0, 2]),
    ([(2,), (0, 1), (1, 2), (3,)], [1, 0, 3]),
    ([(0, 1), (0, 1)], [0]),
]


@pytest.mark.parametrize(("places", "kept"), KEPT, ids=str)
def test_no_micro_batch_is_counted_twice_whoever_comes_first(places, kept):
    snapshots = [_snapshot(rank, *some) for rank, some in enumerate(places)]
    for order in itertools.permutations(snapshots):
        assert [snapshot.rank for snapshot in disjoint(order)] == kept
        assert in_order(order) == in_order(snapshots)


def test_parts_of_a_window_become_one_part_at_the_position_of_the_own():
    about = _snapshot(0, 7, accumulate=5, carry={"weight": torch.ones(2)})
    whole = merge([_snapshot(1, 0, 2), _snapshot(2, 1)], about, CPU)
    assert (whole.places, whole.counts, whole.losses) == ([0, 2, 1], [10, 12, 11], [20, 22, 21])
    assert (whole.rank, whole.window, whole.steps, whole.accumulate) == (0, 3, 2, 5)
    assert whole.carry["weight"].tolist() == [1, 1]
    assert whole.carry["weight"] is not about.carry["weight"]  # it becomes somebody's `.grad`
    assert about.places == [7]
    nothing = merge([], _snapshot(0, 7, sums=_sums(1.0)), CPU)
    assert (nothing.places, nothing.counts, nothing.sums, nothing.batch_norm) == ([], [], {}, [])


def test_rows_of_batch_norm_are_joined_in_the_order_of_the_parts():
    first, second = ([torch.full((rows, 2), float(rows))] for rows in (2, 1))
    parts = [_snapshot(0, 0, 1, batch_norm=first), _snapshot(1), _snapshot(2, 2, batch_norm=second)]
    assert merge(parts, _snapshot(3), CPU).batch_norm[0].tolist() == [[2, 2], [2, 2], [1, 1]]


def _sums(*values: float) -> dict[str, dict[str, torch.Tensor]]:
    """Return an exact sum of constant gradients."""
    total = ExactSum(BucketPlan([0], [NUMEL]), numel=NUMEL, terms=TERMS, device=CPU)
    for index, value in enumerate(values):
        total.deposit_(
            [torch.full((NUMEL,), value)], first=index == 0, nonfinite=torch.zeros(1, dtype=torch.uint8)
        )
    return {"weight": {name: part.clone() for name, part in total.slot_state(0, NUMEL).items()}}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_exact_sums_merge_to_the_bits_of_one_sum(order):
    values = [(1.0, 2.0**-20), (3.0,), ()]
    parts = [
        _snapshot(rank, *range(len(some)), sums=_sums(*some) if some else {})
        for rank, some in enumerate(values)
    ]
    whole = merge([parts[rank] for rank in order], _snapshot(3), CPU).sums["weight"]
    want = _sums(3.0, 1.0, 2.0**-20)["weight"]
    assert {name: part.tolist() for name, part in whole.items() if name != "nonfinite"} == {
        name: part.tolist() for name, part in want.items()
    }
    assert whole["nonfinite"].tolist() == [0, 0, 0]  # one a micro-batch
