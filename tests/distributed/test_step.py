"""The step: clipping, fused and other optimizers, the wrapped optimizer, the record."""

from __future__ import annotations

import math

import pytest
import torch
from cases import engine, me
from torch import nn

import pyengine as pe

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def _steps(kind: str, name: str, max_norm: float) -> list[tuple[float, float]]:
    """Train against a twin that sees the whole global batch; return (our norm, torch's norm) by window."""
    rank, world = me()
    model, twin = _model(), _model()
    sync, forward = engine(kind, model, accumulate=3)
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    generator = torch.Generator().manual_seed(5)
    data = [[torch.randn(2, 6, generator=generator) for _ in range(9)] for _ in range(world)]
    norms = []
    for number, window in enumerate(sync.windows(data[rank])):
        for x in window:
            sync.backward(forward(x).square().sum(), count=2)
        norm = sync.clip_grad_norm_(max_norm)
        assert sync.step(optimizer)
        batch = torch.cat([x for mine in data for x in mine[3 * number : 3 * number + 3]])
        twin.zero_grad()
        (twin(batch).square().sum() / len(batch)).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        other.step()
        norms.append((norm.item(), expected.item()))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            # 18 fp32 additions a window and Adam's quotient, over 3 steps of at most 0.1
            torch.testing.assert_close(p, q, rtol=0, atol=2e-5)
    return norms


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
    for norms in ranks(2).run(_steps, kind, name, max_norm):
        for ours, torchs in norms:
            assert ours == pytest.approx(torchs, rel=1e-5)


def _norm_bits(cap: float, threads: int) -> list[float]:
    """The loss is linear in every weight: its gradients are these values,
    whatever the kernels torch has here.
    """
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


def _clip_without_step() -> float:
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=1)
    for window in sync.windows([torch.full((1, 1), 4.0)]):
        for x in window:
            sync.backward(model(x).sum(), count=2)
        assert sync.clip_grad_norm_(1.0).item() == 2.0
        sync.unscale_()
        return model.weight.grad.item()
    raise AssertionError


def test_unscale_writes_everything_pending(ranks):
    # torch's 1e-6 in the quotient
    assert ranks(1).run(_clip_without_step)[0] == pytest.approx(1.0, rel=2e-6)


def _wrapped(kind: str) -> list[tuple[int, int, float]]:
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
        seen.append((k, scheduler.last_epoch, model.weight.item()))
    assert optimizer.param_groups is sgd.param_groups and not optimizer.step_was_skipped
    return seen


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_the_wrapped_optimizer_steps_only_where_a_window_ends(ranks, kind):
    # gradient 1 in every window; learning rates 1, 0.5, 0.25; the last window has one micro-batch
    expected = [(0, 0, 10.0), (1, 0, 10.0), (2, 1, 9.0), (3, 1, 9.0), (4, 1, 9.0), (5, 2, 8.5), (6, 3, 8.25)]
    assert ranks(2).run(_wrapped, kind) == [expected] * 2


def _wrapped_without_a_last_micro_batch(kind: str) -> tuple[float, float]:
    """Step after `flush`, and on a rank that has run out: neither has a last micro-batch."""
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
    optimizer.step()  # was done already
    sync.flush()  # nothing is left
    optimizer.step()
    flushed = float(model.weight)
    for window in sync.windows([torch.ones(1, 1)] * (2 - 2 * rank)):
        for x in window:
            sync.backward(forward(x).sum())
        optimizer.step()
    assert before == 0
    return flushed, float(model.weight)


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_the_wrapped_optimizer_steps_after_flush_and_in_empty_windows(ranks, kind):
    assert ranks(2).run(_wrapped_without_a_last_micro_batch, kind) == [(-1.0, -2.0)] * 2


def test_is_sync_step_is_true_for_the_last_micro_batch_only():
    model = nn.Linear(1, 1)
    sync = pe.GradSync(model, accumulate=3)
    flags = []
    for _ in range(6):
        with sync.accumulate():
            flags.append(sync.is_sync_step)
            sync.backward(model(torch.ones(1, 1)).sum())
        if flags[-1]:
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert flags == [False, False, True] * 2


def _record(kind: str) -> list[pe.StepRecord]:
    rank, _ = me()
    model = nn.Linear(1, 1, bias=False)
    sync, forward = engine(kind, model, accumulate=2)
    model.weight.data.fill_(2.0)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    for window in sync.windows([torch.full((1, 1), 1.0 + rank)] * (3 + rank)):
        for x in window:
            sync.backward(forward(x).sum(), count=5)
        sync.clip_grad_norm_(0.1)  # below the norm: the record's is the one before
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    return records


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_the_record_holds_what_all_ranks_did(ranks, kind):
    for records in ranks(2).run(_record, kind):
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


def _group() -> list[float]:
    import torch.distributed as dist

    rank, _ = me()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=1, process_group=groups[rank // 2])
    for window in sync.windows([torch.full((1, 1), 1.0 + rank)]):
        for x in window:
            sync.backward(model(x).sum())
        sync.unscale_()
    return [model.weight.grad.item()]


def test_a_process_group_of_its_own(ranks):
    assert ranks(3).run(_group) == [[1.5], [1.5], [3.0]]
