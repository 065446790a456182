"""accumulator="exact": the same micro-batches give the same bits for every world size."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from cases import error_of, me, records_of
from exact_cases import STEPS, Cnn, Gpt, digest, train_gpt, wrap
from marks import rest
from ranks import on_ranks
from torch import nn

import pyengine as pe

MICRO_BATCHES = 6
F32, BF16 = torch.float32, torch.bfloat16
# Four ranks divide six micro-batches unequally; with a sharded model, two of the ranks pad.
CASES = [
    *[("own", 3, BF16), ("own", 4, F32), ("attach", 1, BF16), ("attach", 3, F32), ("attach", 4, BF16)],
    *[("fsdp", 1, F32), ("fsdp", 3, BF16), ("hsdp", 4, F32)],
    *rest(("own", 2, F32), ("fsdp", 2, BF16), ("fsdp", 4, BF16), ("hsdp", 2, BF16)),
]


_alone: dict[Any, Any] = {}


def _single(ranks, fn, *case: Any) -> Any:
    """Return the result on one rank, computed once per session."""
    if (fn, *case) not in _alone:
        _alone[(fn, *case)] = ranks(1).run(fn, *case)[0]
    return _alone[(fn, *case)]


@pytest.mark.parametrize(("kind", "world", "dtype"), CASES)
def test_every_world_size_and_mesh_gives_the_same_bits(ranks, kind, world, dtype):
    alone = _single(ranks, train_gpt, "own", dtype, MICRO_BATCHES, "exact")
    assert ranks(world).run(train_gpt, kind, dtype, MICRO_BATCHES, "exact") == [alone] * world


def test_more_ranks_than_micro_batches_change_nothing_if_the_window_is_named(ranks):
    case = F32, 3, pe.Exact(micro_batches=3)
    assert ranks(4).run(train_gpt, "own", *case) == [_single(ranks, train_gpt, "own", *case)] * 4


def _dealt_at_random(seed: int) -> list[str]:
    """Deal each window's micro-batches to ranks randomly and unevenly; return digests after each step."""
    rank, world = me()
    deal = random.Random(seed)  # the same on every rank
    cuts = sorted(deal.sample(range(1, MICRO_BATCHES), world - 1))
    shares = [b - a for a, b in itertools.pairwise([0, *cuts, MICRO_BATCHES])]
    torch.manual_seed(0)
    model = Gpt(F32)
    data = torch.randint(0, 50, (MICRO_BATCHES * STEPS, 9))
    sync = pe.GradSync(model, accumulate=shares[rank], accumulator="exact", bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digests = []
    for step in range(STEPS):
        order = deal.sample(range(MICRO_BATCHES), MICRO_BATCHES)
        mine = order[sum(shares[:rank]) : sum(shares[: rank + 1])]
        for index in mine:
            with pe.micro_batch_rng(7, step=step, index=index), sync.accumulate():
                row = MICRO_BATCHES * step + index
                sync.backward(model(data[row : row + 1]), count=8)
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
        digests.append(digest(*model.parameters()))
    return digests


@pytest.mark.parametrize("world", [4, *rest(2)])
def test_any_assignment_of_micro_batches_in_any_order_gives_the_same_bits(ranks, world):
    assert ranks(world).run(_dealt_at_random, world) == [_single(ranks, _dealt_at_random, 99)] * world


def _bad_window(kind: str, dtype: torch.dtype, where: int, spike: float) -> tuple[list[str], list[bool], str]:
    """Train windows of four micro-batches; the loss of micro-batch `where` of the second window is bad."""
    rank, world = me()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    sync, forward = wrap(kind, model, 25, accumulate=4 // world, accumulator="exact")
    records = records_of(sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digests, steps = [], []
    for step in range(3):
        for k in range(4 // world):
            index = rank * (4 // world) + k
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(4 * step + index)).to(dtype)
            with sync.accumulate():
                loss = forward(x).float().square().sum()
                sync.backward(loss * (spike if (step, index) == (1, where) else 1.0), count=3)
        sync.clip_grad_norm_(0.5)
        steps.append(bool(sync.step(optimizer)))
        digests.append(digest(*model.parameters()))
    return digests, steps, records[1].reason


@pytest.mark.parametrize(
    ("kind", "world", "dtype", "spike"),
    [
        ("own", 2, BF16, 1e4),
        ("own", 4, F32, math.nan),
        ("attach", 2, F32, 1e4),
        ("attach", 4, BF16, math.inf),
        ("fsdp", 2, F32, math.nan),
        ("hsdp", 4, BF16, 1e4),
    ],
)
def test_a_bad_value_is_handled_and_named_alike_on_every_world_size(ranks, kind, world, dtype, spike):
    alone = _single(ranks, _bad_window, "own", dtype, 2, spike)[0]
    for digests, steps, reason in ranks(world).run(_bad_window, kind, dtype, 2, spike):
        assert digests == alone
        assert steps == [True, spike == 1e4, True]
        rank, k = divmod(2, 4 // world)
        assert (f"rank {rank}, micro-batch {k}" in reason) == (spike != 1e4)


@on_ranks(2)
def test_a_count_that_an_exact_sum_cannot_take_is_refused_on_every_rank():
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulator="exact")

    def window(count: float) -> None:
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 2)).sum(), count=count)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))

    error = error_of(window, 2.5)
    assert "all ranks: count of micro-batch 0 is 2.5" in error and "count must be finite, whole" in error
    sync.abandon()
    window(2.0)


@on_ranks(3)
def test_more_micro_batches_than_the_sum_can_take_is_an_error_on_every_rank():
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=4, accumulator=pe.Exact(micro_batches=4))
    before = model.weight.detach().clone()
    says = r"window of 12 micro-batches over all ranks.*pe\.Exact\(micro_batches=12\)"
    with pytest.raises(ValueError, match=says):
        for window in sync.windows([torch.ones(1, 2)] * 4):
            for x in window:
                sync.backward(model(x).sum())
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model.weight, before)


def _train_cnn(kind: str) -> tuple[str, list[float]]:
    """Train for two windows; return a digest of parameters and optimizer, and a running mean."""
    torch.manual_seed(0)
    model = Cnn()
    data = torch.randn(4 * MICRO_BATCHES, 3, 5, 5)
    sampler = pe.WindowSampler(len(data), seed=7, micro_batch=2, global_batch=2 * MICRO_BATCHES)
    sync, forward = wrap(kind, model, 0.001, accumulate=sampler.accumulate, accumulator="exact")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for window in sync.windows(sampler):
        for rows in window:
            sync.backward(forward(data[rows]), count=len(rows))
        assert sync.step(optimizer)
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return digest(*model.parameters(), *state), model.norm.running_mean.tolist()


@pytest.mark.parametrize(("kind", "world"), [("own", 2), ("attach", 3), *rest(("own", 3), ("attach", 2))])
def test_parameters_under_batch_norm_have_the_same_bits_and_running_statistics_those_of_ranks(
    ranks, kind, world
):
    """Statistics are averages over a rank's micro-batches; with DDP, over those of rank 0."""
    alone, mean = _single(ranks, _train_cnn, "own")
    digests, means = zip(*ranks(world).run(_train_cnn, kind), strict=True)
    assert digests == (alone,) * world
    assert mean not in means


@on_ranks(2)
def test_a_sync_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    assert "1 is a SyncBatchNorm: with accumulator='exact'" in error_of(
        pe.GradSync, model, accumulate=1, accumulator="exact"
    )


# ---- optimizers over shards, as in docs/reproducible.md ----

_OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}
_NUMEL = 1037


def _stepped(name: str, dtype: torch.dtype, shard: int, **options: bool) -> torch.Tensor:
    """Return a parameter after four steps of its shards, which have `shard` elements each."""
    kind, settings = _OPTIMIZERS[name]
    values = torch.Generator().manual_seed(0)
    whole, *grads = (torch.randn(_NUMEL, generator=values).to(dtype) for _ in range(5))
    params = [nn.Parameter(part.clone()) for part in whole.split(shard)]
    optimizer = kind(params, lr=0.1, **settings, **options)
    for grad in grads:
        for param, part in zip(params, grad.split(shard), strict=True):
            param.grad = part.clone()
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("shard", [519, 347, 61, 7])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, F32) for name in _OPTIMIZERS), ("AdamW", BF16)], ids=str
)
def test_shards_of_any_size_are_stepped_to_the_bits_of_the_whole(name, dtype, foreach, shard):
    whole = _stepped(name, dtype, _NUMEL, foreach=foreach)
    assert torch.equal(_stepped(name, dtype, shard, foreach=foreach), whole)
