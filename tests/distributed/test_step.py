"""The step: clipping, fused and other optimizers, the wrapped optimizer, the record."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import clip_and_step, engine, me, records_of
from ranks import on_ranks
from torch import nn

import pyengine as pe

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad fused": partial(torch.optim.Adagrad, lr=0.01, fused=True),
}


@pytest.mark.parametrize(
    ("kind", "name", "max_norm"),
    [
        ("own", "sgd", 0.05),
        ("own", "adamw fused", 1e9),
        ("own", "adagrad fused", 0.05),
        ("attach", "sgd fused", 0.05),
        ("attach", "adamw", 1e9),
        ("attach", "adamw foreach", 0.05),
    ],
)
def test_clip_and_step_equal_one_big_batch(ranks, kind, name, max_norm):
    ranks(2).run(clip_and_step, kind, OPTIMIZERS[name], max_norm)


def _norm_bits(cap: float, threads: int) -> list[float]:
    """Return the norm for a loss that is linear in every weight: gradients depend on no kernel of torch."""
    torch.set_num_threads(threads)
    model = nn.Sequential(nn.Linear(300, 301), nn.Linear(301, 302))
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    sync = pe.GradSync(model, accumulate=1, bucket_cap_mb=cap)
    for window in sync.windows([given]):
        for gradients in window:
            pairs = zip(model.parameters(), gradients, strict=True)
            sync.backward(torch.stack([(p * gradient).sum() for p, gradient in pairs]).sum())
        norm = sync.grad_norm().item()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], given))
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    torch.set_num_threads(1)
    return [norm]


@pytest.mark.parametrize("cap, threads", [(0.001, 1), (0.3, 2), (25, 3)])
def test_the_norm_does_not_depend_on_buckets_or_threads(ranks, cap, threads):
    assert ranks(1).run(_norm_bits, cap, threads) == ranks(1).run(_norm_bits, 25, 1)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_the_wrapped_optimizer_steps_only_where_a_window_ends(kind):
    model = nn.Linear(1, 1, bias=False)
    sync, forward = engine(kind, model, accumulate=3)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step)
    optimizer = sync.wrap(sgd, scheduler)
    model.weight.data.fill_(10.0)
    seen = []
    for k in range(7):
        with sync.accumulate(last=k == 6):
            sync.backward(forward(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        seen.append((scheduler.last_epoch, model.weight.item()))
    assert optimizer.param_groups is sgd.param_groups and not optimizer.step_was_skipped
    # gradient 1 in every window; learning rates 1, 0.5, 0.25; the last window has one micro-batch
    assert seen == [(0, 10.0), (0, 10.0), (1, 9.0), (1, 9.0), (1, 9.0), (2, 8.5), (3, 8.25)]


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("value", [1.0, math.nan])
@on_ranks(2)
def test_is_sync_step_from_the_last_block_until_the_next_even_if_the_step_is_skipped(is_wrapped, value):
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=2)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = sync.wrap(sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first skipped step warns
        for k in range(5):
            before = sync.is_sync_step
            with sync.accumulate(last=k == 4):
                seen = [sync.is_sync_step]
                sync.backward(model(torch.full((1, 1), value)).sum())
                seen.append(sync.is_sync_step)
                if is_wrapped:
                    wrapped.step()
                    wrapped.zero_grad()
                    seen.append(sync.is_sync_step)
            seen.append(sync.is_sync_step)
            is_last = k in (1, 3, 4)
            if is_last and not is_wrapped:
                assert bool(sync.step(sgd)) is (value == 1.0)
            assert [*seen, sync.is_sync_step] == [is_last] * (len(seen) + 1)
            assert before is (k in (2, 4))
    assert not is_wrapped or wrapped.step_was_skipped is (value != 1.0)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_the_wrapped_optimizer_steps_after_flush_and_in_empty_windows(kind):
    """A flushed window and an empty one have no last micro-batch."""
    rank, _ = me()
    model = nn.Linear(1, 1, bias=False)
    sync, forward = engine(kind, model, accumulate=4)
    model.weight.data.zero_()
    optimizer = sync.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    with sync.accumulate():
        sync.backward(forward(torch.ones(1, 1)).sum())
        optimizer.step()
    before = float(model.weight)
    sync.flush()
    optimizer.step()
    optimizer.step()  # no effect: already stepped
    sync.flush()  # no effect: nothing is left
    optimizer.step()
    flushed = float(model.weight)
    for window in sync.windows([torch.ones(1, 1)] * (2 - 2 * rank)):
        for x in window:
            sync.backward(forward(x).sum())
        optimizer.step()
    assert before == 0
    assert (flushed, float(model.weight)) == (-1.0, -2.0)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_the_record_holds_what_all_ranks_did(kind):
    rank, _ = me()
    model = nn.Linear(1, 1, bias=False)
    sync, forward = engine(kind, model, accumulate=2)
    model.weight.data.fill_(2.0)
    records = records_of(sync)
    for window in sync.windows([torch.full((1, 1), 1.0 + rank)] * (3 + rank)):
        for x in window:
            sync.backward(forward(x).sum(), count=5)
        sync.clip_grad_norm_(0.1)  # below the norm, but the record has the norm before clipping
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert [r.step for r in records] == [0, 1]
    assert [r.micro_batches for r in records] == [4, 3]
    assert [r.count for r in records] == [20.0, 15.0]
    assert [r.loss for r in records] == [pytest.approx(12 / 20), pytest.approx(10 / 15)]
    assert [r.grad_norm for r in records] == [pytest.approx(6 / 20), pytest.approx(5 / 15)]
    assert not any(r.skipped or r.reason for r in records)
    assert all(math.isfinite(r.step_s) and r.step_s >= r.backward_s > 0 for r in records)


def _initial_values(source: str) -> list[torch.Tensor]:
    rank, _ = me()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank)
    params = {"module": model, "params": model.parameters(), "named": model.named_parameters()}[source]
    pe.GradSync(params, accumulate=1)
    return [p.detach().clone() for p in model.parameters()] + [model[1].running_mean.clone()]


@pytest.mark.parametrize("source", ["module", "params", "named"])
def test_every_rank_starts_from_rank_0s_values(ranks, source):
    first, *others = ranks(3).run(_initial_values, source)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[:-1], other[:-1], strict=True))
        assert torch.equal(first[-1], other[-1]) == (source == "module")  # buffers come with a module only


@on_ranks(3)
def test_a_process_group_of_its_own():
    rank, _ = me()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=1, process_group=groups[rank // 2])
    for window in sync.windows([torch.full((1, 1), 1.0 + rank)]):
        for x in window:
            sync.backward(model(x).sum())
        sync.unscale_()
    assert model.weight.grad.item() == [1.5, 1.5, 3.0][rank]
