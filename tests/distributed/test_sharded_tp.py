"""FSDP2 over models with tensor parallelism: two data shards, with two ranks each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cases import assert_alike, me, records_of
from marks import rest
from meshes import (
    ACCUMULATE,
    Block,
    Sequence,
    assert_resumes,
    assert_trained,
    count_of,
    cut,
    cut_sequence,
    in_one_process,
    loss_of,
    mesh_of,
    micro_batches,
    train,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import pyengine as pe


class Twice(nn.Module):
    """Two blocks, each of which is an FSDP unit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = Block(dtype), Block(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


Made = tuple[pe.Sync, nn.Module]


def _cut(*, narrow: bool = False, **options: Any) -> Made:
    mesh, model = mesh_of(dp=2, tp=2), Twice(torch.float32)
    policy = MixedPrecisionPolicy()
    if narrow:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (model.first, model.second):
        fully_shard(cut(block, mesh), mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return pe.attach(model, accumulate=ACCUMULATE, **options), model


def _sequence(**options: Any) -> Made:
    mesh, model = mesh_of(dp=2, tp=2), Sequence(torch.float32)
    fully_shard(cut_sequence(model, mesh), mesh=mesh["dp"])
    return pe.attach(model, accumulate=ACCUMULATE, **options), model


def _mine() -> list[Tensor]:
    """Return the data of this rank's shard; two ranks share a shard."""
    return micro_batches(me()[0] // 2, torch.float32)


def _shards() -> list[list[Tensor]]:
    return [micro_batches(shard, torch.float32) for shard in range(2)]


@pytest.mark.parametrize(
    ("options", "narrow"),
    [({}, False), ({"defer": "none"}, True), *rest(({"defer_budget_mb": float("inf")}, False))],
    ids=str,
)
@on_ranks(4)
def test_elements_and_counts_are_taken_once_over_both_axes(options, narrow):
    torch.manual_seed(0)
    want, norms = in_one_process(Twice(torch.float64), _shards())
    sync, model = _cut(narrow=narrow, **options)
    records = records_of(sync)
    found = train(model, sync, _mine())
    assert_trained(model, want, (found, norms), narrow=narrow)
    for record, start in zip(records, (0, ACCUMULATE), strict=True):
        count = sum(count_of(x) for shard in _shards() for x in shard[start : start + ACCUMULATE])
        assert (record.micro_batches, record.count) == (2 * ACCUMULATE, count)
    assert_alike(found)


@on_ranks(4)
def test_a_state_goes_on():
    assert_resumes(partial(_sequence, nonfinite="raise"), _mine())


@on_ranks(4)
def test_residuals_of_what_this_rank_has_go_on_from_a_state():
    norms, states = [], []
    for begin in (0, ACCUMULATE):
        sync, model = _cut(wire=pe.wire.ErrorFeedback(pe.wire.Int8()))
        if states:
            sync.load_state_dict(states[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for window in sync.windows(_mine()[begin:]):
            for x in window:
                sync.backward(loss_of(model, x), count=count_of(x))
            norms.append(sync.grad_norm())
            sync.step(optimizer)
            optimizer.zero_grad()
            states.append(sync.state_dict())
        sync.close()
    _, second, again = norms
    assert torch.equal(second, again)
    residuals = states[0][f"rank {me()[0]} of 4"][0]["residuals"]
    assert residuals["first.up.weight"].shape == (4 * 6,)  # 4 of 8 rows


@on_ranks(4)
def test_gradients_that_are_partial_sums_are_redistributed():
    want, norms = in_one_process(Sequence(torch.float64), _shards())
    sync, model = _sequence()
    found = train(model, sync, _mine())
    assert_trained(model, want, (found, norms))
    assert_alike(found)


REFUSED = {
    "exact": "accumulator='exact' with tensor parallelism below FSDP",
    "one unit over all ranks": "FSDP unit 'down' is on a mesh of ranks [0, 1, 2, 3]",
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(4)
def test_meshes_that_do_not_fit_together_are_refused_on_every_rank(case):
    mesh, model, options = mesh_of(dp=2, tp=2), Block(torch.float32), {}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
    if case == "exact":
        options = {"accumulator": "exact"}
    else:
        fully_shard(model.down)
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError) as error:
        pe.attach(model, accumulate=3, **options)
    assert REFUSED[case] in str(error.value)
