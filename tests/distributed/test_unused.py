"""A parameter is reduced if any micro-batch of any rank uses it; otherwise its gradient is None.

DDP with find_unused_parameters remembers which parameters earlier micro-batches used. Their gradients are in
the engine's sum, and the last backward does not reach them.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from cases import assert_same, engine, grads, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.gradients import used_anywhere

ACCUMULATE, WINDOWS = 3, 3
# Whether a micro-batch uses a parameter, by (window, rank, place); not every window uses the same ones.
USED = {
    "always": lambda window, rank, place: True,
    "first": lambda window, rank, place: place == 0 and window != 1,
    "second_on_rank_0": lambda window, rank, place: (rank, place) == (0, 1),
    "in_turn": lambda window, rank, place: (rank + place) % 2 == 0 and window != 0,
    "last": lambda window, rank, place: place == 2,
    "never": lambda window, rank, place: False,
}


class Branches(nn.Module):
    """One parameter per branch, with the gradient `x` if the branch is used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in USED:
            self.register_parameter(name, nn.Parameter(torch.ones(5, dtype=dtype)))

    def forward(self, x: Tensor, used: list[str]) -> Tensor:
        return torch.stack(
            [(self.get_parameter(name) * x.to(self.always.dtype)).sum() for name in used]
        ).sum()


def _input(window: int, rank: int, place: int) -> Tensor:
    return torch.arange(5.0) + window + 2 * rank + place


def _expected(dtype: torch.dtype, window: int, members: list[tuple[int, int]]) -> dict[str, Tensor | None]:
    """Return the mean over (rank, place) pairs: a sum of integers, one float32 product, then the dtype."""
    inverse = torch.tensor(1.0 / len(members), dtype=torch.float64).float()
    used = {name: [m for m in members if uses(window, *m)] for name, uses in USED.items()}
    return {
        name: sum(_input(window, *m).double() for m in mine).float().mul(inverse).to(dtype) if mine else None
        for name, mine in used.items()
    }


EXACT = {"accumulator": "exact"}
NARROW, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "how"),
    [
        ("attach-unused", NARROW, {}, "windows"),
        ("attach-unused-view", NARROW, {}, "runs out"),
        ("attach-unused-view", NARROW, {}, "flush"),
        ("attach-unused-view", NARROW, EXACT, "windows"),
        ("attach-unused", WIDE, EXACT, "runs out"),
        ("attach-unused", WIDE, EXACT, "flush"),
        ("own", WIDE, {"bucket_cap_mb": 1e-5}, "flush"),
        ("own-native", WIDE, {"bucket_cap_mb": 1e-5}, "windows"),
        ("own-exact", WIDE, {"bucket_cap_mb": 1e-5}, "runs out"),
        ("attach", WIDE, {"accumulator": "native"}, "flush"),
        ("attach-view", WIDE, {}, "windows"),
    ],
    ids=str,
)
@on_ranks(3)
def test_gradients_are_those_of_one_big_batch(kind, dtype, options, how):
    rank, world = me()
    model = Branches(dtype)
    sync, forward = engine(kind, model, accumulate=ACCUMULATE + (how == "flush"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run(window: int, place: int) -> None:
        used = [name for name, uses in USED.items() if uses(window, rank, place)]
        sync.backward(forward(_input(window, rank, place), used))

    def check(window: int) -> None:
        left = [r for r in range(world) if how != "runs out" or window == 0 or r < world - 1]
        members = [(r, place) for r in left for place in range(ACCUMULATE)]
        sync.unscale_()
        assert_same(grads(model), _expected(dtype, window, members))
        sync.step(optimizer)

    if how == "flush":
        for window in range(WINDOWS):
            for place in range(ACCUMULATE):
                with sync.accumulate():
                    run(window, place)
            sync.flush()
            check(window)
        return
    windows = 1 if how == "runs out" and rank == world - 1 else WINDOWS
    places = [(window, place) for window in range(windows) for place in range(ACCUMULATE)]
    for window, micro_batches in enumerate(sync.windows(places)):
        for where in micro_batches:
            run(*where)
        check(window)


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(2)
def test_the_host_reads_the_used_flags_of_all_buckets_at_once_and_only_if_it_must(accumulator):
    """There are three buckets, each with a parameter that is unused at times."""
    rank, _ = me()
    layers = [nn.Linear(2, 1, bias=False) for _ in range(6)]
    sync = pe.GradSync(nn.ModuleList(layers), accumulate=1, accumulator=accumulator, bucket_cap_mb=4e-4)
    sync._engine.reducer.lay_out_as([0, 1, 2, 3, 4, 5])
    optimizer, counts = torch.optim.SGD([layer.weight for layer in layers], lr=0.0), []
    with mock.patch.object(used_anywhere, "Readback", wraps=used_anywhere.Readback) as reads:
        for number, window in enumerate(sync.windows([torch.ones(1, 2)] * 3)):
            for x in window:
                # window 0: all are used; 1: odd ones are used nowhere; 2: odd ones only on rank 1
                used = layers if number == 0 or (number, rank) == (2, 1) else layers[::2]
                sync.backward(torch.stack([layer(x).sum() for layer in used]).sum())
            sync.unscale_()
            assert [layer.weight.grad is None for layer in layers] == [False, number == 1] * 3
            sync.step(optimizer)
            counts.append(reads.call_count)
            reads.reset_mock()
    assert len(sync._engine.reducer.layout.buckets) == 3
    assert counts == [[0, 1, 1], [0, 1, 0]][me()[0]]


@pytest.mark.parametrize(
    ("accumulator", "dtype"),
    [("exact", torch.float32), ("fp32", torch.bfloat16), ("native", torch.float32)],
    ids=str,
)
@on_ranks(2)
def test_under_ddp_what_a_window_of_one_micro_batch_does_not_use_has_no_gradient(accumulator, dtype):
    """In the first window, no earlier micro-batch has created the engine's buckets."""
    model = Branches(dtype)
    ddp = DistributedDataParallel(model)
    sync = pe.attach(ddp, accumulate=1, accumulator=accumulator)
    for window in sync.windows([_input(0, 0, 0)] * 2):
        for x in window:
            sync.backward(ddp(x, ["always"]))
        sync.unscale_()
        assert [name for name, grad in grads(model).items() if grad is not None] == ["always"]
