"""FSDP2 over models that tensor parallelism has cut: two data shards, two ranks to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Inject, me
from meshes import (
    ACCUMULATE,
    Block,
    assert_trained,
    count_of,
    in_one_process,
    loss_of,
    mesh_of,
    micro_batches,
    train,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pyengine as pe


class Twice(nn.Module):
    """Two blocks, each a unit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = Block(dtype), Block(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _cut(*, narrow: bool = False, **options: Any) -> tuple[pe.Sync, nn.Module, int]:
    """Return an engine over a model, that, and this rank's data shard."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, model = mesh_of(dp=2, tp=2), Twice(torch.float32)
    policy = MixedPrecisionPolicy()
    if narrow:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (model.first, model.second):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return pe.attach(model, accumulate=ACCUMULATE, **options), model, mesh["dp"].get_local_rank()


def _shards() -> list[list[Tensor]]:
    return [micro_batches(shard, torch.float32) for shard in range(2)]


def _trains(options: dict[str, Any], *, narrow: bool) -> list[str]:
    """Return the bits of the norms."""
    torch.manual_seed(0)
    want, norms = in_one_process(Twice(torch.float64), _shards())
    sync, model, shard = _cut(narrow=narrow, **options)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    found = train(model, sync, _shards()[shard])
    assert_trained(model, want, (found, norms), narrow=narrow)
    for record, start in zip(records, (0, ACCUMULATE), strict=True):
        count = sum(count_of(x) for shard in _shards() for x in shard[start : start + ACCUMULATE])
        assert (record.micro_batches, record.count) == (2 * ACCUMULATE, count)
    return [norm.hex() for norm in found]


@pytest.mark.parametrize(
    ("options", "narrow"),
    [({}, False), ({"defer": "none"}, True), ({"defer_budget_mb": float("inf")}, False)],
    ids=str,
)
def test_elements_and_counts_are_taken_once_over_both_axes(ranks, options, narrow):
    first, *others = ranks(4).run(_trains, options, narrow=narrow)
    assert others == [first] * 3


def _resumes(make: Callable[..., tuple[pe.Sync, nn.Module, int]], **options: str) -> None:
    sync, model, shard = make(**options)
    data = _shards()[shard][:ACCUMULATE]
    for window in sync.windows(data):
        for number, x in enumerate(window):
            sync.backward(loss_of(model, x), count=count_of(x))
            if number == 1:
                state = sync.state_dict()
        sync.unscale_()
    want = [param.grad.full_tensor() for param in model.parameters()]
    sync.close()
    sync, model, _ = make(**options)
    sync.load_state_dict(state)
    for window in sync.windows(data[2:]):
        for x in window:
            sync.backward(loss_of(model, x), count=count_of(x))
        sync.unscale_()
    for param, grad in zip(model.parameters(), want, strict=True):
        assert torch.equal(param.grad.full_tensor(), grad)


def test_a_state_of_an_open_window_goes_on(ranks):
    ranks(4).run(_resumes, _cut, nonfinite="raise")


def _goes_on_with_what_is_lost() -> None:
    wire = pe.wire.ErrorFeedback(pe.wire.Int8())
    sync, model, shard = _cut(wire=wire)
    data, norms, states = _shards()[shard], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in sync.windows(data):
        for x in window:
            sync.backward(loss_of(model, x), count=count_of(x))
        norms.append(sync.grad_norm())
        sync.step(optimizer)
        optimizer.zero_grad()
        states.append(sync.state_dict())
    sync.close()
    sync, model, _ = _cut(wire=wire)
    sync.load_state_dict(states[0])
    for window in sync.windows(data[ACCUMULATE:]):
        for x in window:
            sync.backward(loss_of(model, x), count=count_of(x))
        assert torch.equal(sync.grad_norm(), norms[1])
        sync.unscale_()
    rank, _ = me()
    assert states[0][f"rank {rank} of 4"][0]["residuals"]["first.up.weight"].shape == (4 * 6,)  # of 8 rows, 4


def test_residuals_of_what_this_rank_has_go_on_from_a_state(ranks):
    ranks(4).run(_goes_on_with_what_is_lost)


def _is_skipped() -> bool:
    sync, model, shard = _cut()
    rank, _ = me()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for window in sync.windows(_shards()[shard][:ACCUMULATE]):
        for x in window:
            loss = loss_of(model, x)
            sync.backward(Inject.apply(loss, torch.inf) if rank < 2 else loss, count=count_of(x))
        return bool(sync.step(optimizer))


def test_a_step_that_is_not_finite_in_one_data_shard_is_skipped_on_all_ranks(ranks):
    assert ranks(4).run(_is_skipped) == [False] * 4


def _counts_differ() -> str:
    rank, _ = me()
    sync, model, shard = _cut()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError) as error:
        for window in sync.windows(_shards()[shard][:ACCUMULATE]):
            for x in window:
                sync.backward(loss_of(model, x), count=2 if rank == 1 else 1)
            sync.step(optimizer)
    return str(error.value)


def test_ranks_of_one_data_shard_that_count_differently_are_told(ranks):
    for message in ranks(4).run(_counts_differ):
        assert "batch 0" in message


class _Sequence(nn.Module):
    """A norm whose gradients are partial sums under sequence parallelism."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        block = Block(dtype)
        self.norm, self.up, self.down = block.norm, block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _sequence() -> tuple[pe.Sync, nn.Module, int]:
    """Return the same as `_cut`, over another model."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh, model = mesh_of(dp=2, tp=2), _Sequence(torch.float32)
    plan = {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)),
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return pe.attach(model, accumulate=ACCUMULATE), model, mesh["dp"].get_local_rank()


def _sequence_parallel() -> list[str]:
    want, norms = in_one_process(_Sequence(torch.float64), _shards())
    sync, model, shard = _sequence()
    found = train(model, sync, _shards()[shard])
    assert_trained(model, want, (found, norms))
    return [norm.hex() for norm in found]


def test_gradients_that_are_partial_sums_are_redistributed(ranks):
    first, *others = ranks(4).run(_sequence_parallel)
    assert others == [first] * 3
    ranks(4).run(_resumes, _sequence)


def _refused(case: str) -> str:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, model, options = mesh_of(dp=2, tp=2), Block(torch.float32), {}
    match case:
        case "exact":
            options = {"accumulator": "exact"}
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        case "one unit over all ranks":
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
            fully_shard(model.down)
            fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError) as error:
        pe.attach(model, accumulate=3, **options)
    return str(error.value)


REFUSED = {
    "exact": "accumulator='exact' with tensor parallelism below FSDP",
    "one unit over all ranks": "FSDP unit 'down' is on a mesh of ranks [0, 1, 2, 3]",
}


@pytest.mark.parametrize("case", REFUSED)
def test_meshes_that_do_not_fit_together_are_refused_on_every_rank(ranks, case):
    for message in ranks(4).run(_refused, case):
        assert REFUSED[case] in message
