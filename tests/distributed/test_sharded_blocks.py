"""FSDP2 and micro-batches whose backwards are the caller's; and gradients that come past the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from cases import Batch, assert_same, me
from sharded_cases import PLAN, batch, items, loss_of, own_batches, right_grads, sharded, whole_grads
from torch import nn

import pyengine as pe


def _twice(sync: pe.Sync, model: nn.Module, data: Batch, n: int) -> None:
    loss = loss_of(model, data)
    with sync.micro_batch(count=n):
        loss.backward(retain_graph=True)
        (2 * loss).backward()


def _beside_grad(sync: pe.Sync, model: nn.Module, data: Batch, n: int) -> None:
    """What `torch.autograd.grad` computes is no gradient of the window, and is not refused either."""
    loss = loss_of(model, data)
    other = loss_of(model, data, extra=True) * torch.inf
    scale, sometimes = model.scale, model.sometimes  # unsharded by the forward
    torch.autograd.grad(other, [scale, sometimes])
    torch.autograd.grad(loss, scale, retain_graph=True)
    sync.backward(loss, count=n)


def _marked(sync: pe.Sync, model: nn.Module, data: Batch, n: int) -> None:
    loss = loss_of(model, data)
    with sync.micro_batch(count=n) as mb:
        loss.backward(retain_graph=True)
        with mb.last_backward(loss):
            (2 * loss).backward()


def _chunks(sync: pe.Sync, model: nn.Module, data: Batch, n: int) -> None:
    """As many forwards on every rank, of other rows."""
    with sync.micro_batch() as mb:
        for x, t in zip(*(part.tensor_split(2) for part in data), strict=True):
            loss_of(model, (x, t)).backward()
        mb.count = n


def _cached(sync: pe.Sync, model: nn.Module, data: Batch, n: int) -> None:
    """GradCache: once without a graph, then with the gradient of what that gave."""
    with sync.micro_batch(count=n) as mb:
        with torch.no_grad():
            leaf = loss_of(model, data)
        (2 * leaf.requires_grad_()).backward()
        with mb.last_backward():
            loss_of(model, data).backward(leaf.grad)


def _several(sync: pe.Sync, model: nn.Module, data: Batch, n: int) -> None:
    """Several losses over one graph."""
    x, t = data
    with sync.micro_batch(count=n):
        out = model(x).to(t.dtype)
        (out * t).sum().backward(retain_graph=True)
        (out * t * 2).sum().backward()


def _one_line(sync: pe.Sync, model: nn.Module, data: Batch, n: int) -> None:
    loss = loss_of(model, data)
    sync.backward(torch.stack([loss, loss]), count=n, gradient=torch.ones(2))


# How often each adds the gradient of a micro-batch. Rank r has PLAN[r] micro-batches, each goes another way.
WAYS = {_twice: 3, _beside_grad: 1, _marked: 3, _chunks: 1, _cached: 2, _several: 3, _one_line: 2}


def _train(kind: str, options: dict[str, object]) -> None:
    """Ranks have other numbers of micro-batches, and all go the same ways: forwards are collective."""
    rank, world = me()
    sync, model = sharded(kind, accumulate=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    done = 0
    for window in sync.windows(range(PLAN[rank])):
        first = done
        for k in window:
            n = items(rank, k)
            [*WAYS][done](sync, model, batch(100 * rank + k, n), n)
            done += 1
        norm = sync.grad_norm()
        sync.unscale_()
        members = [(r, k) for r in range(world) for k in range(first, min(done, PLAN[r]))]
        batches = [batch(100 * r + k, items(r, k)) for r, k in members for _ in range([*WAYS.values()][k])]
        want = right_grads(batches, sum(items(*m) for m in members))
        assert_same(whole_grads(model), want)
        squares = sum(grad.double().square().sum() for grad in want.values() if grad is not None)
        # Every product with 1/count was rounded to float32, behind the norm.
        torch.testing.assert_close(norm, squares.sqrt(), rtol=2**-23, atol=0)
        assert sync.step(optimizer)
        for param in model.parameters():
            param.grad = None
    assert done == max(PLAN[:world]) == len(WAYS)


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("flat", 1, {}),
        ("flat", 3, {"nonfinite": "drop_micro_batch"}),
        ("nested", 3, {"nonfinite": "raise"}),
        ("nested", 4, {"narrow": True}),
        ("nested", 2, {"defer": "none"}),
        ("nested", 2, {"defer_budget_mb": 1.0}),
        ("nested", 3, {"accumulator": "exact"}),
        ("hsdp", 4, {}),
        ("hsdp", 4, {"defer": "outer", "narrow": True}),
        ("replicate", 3, {"narrow": True}),
        ("replicate", 2, {"accumulator": "exact"}),
    ],
    ids=str,
)
def test_any_backwards_over_a_sharded_model_add_up_to_one_big_batch(ranks, kind, world, options):
    ranks(world).run(_train, kind, options)


WHERE = ("between windows", "between micro-batches", "behind the last", "only")


@contextlib.contextmanager
def _noted(said: list[str], sync: pe.Sync) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:
        said.append(str(error))
        sync.abandon()
    else:
        said.append("")


def _strays(kind: str, where: str, options: dict[str, object]) -> list[str]:
    """Return what four windows of three raise; in the second every rank runs a backward past the engine."""
    _, world = me()
    sync, model = sharded(kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    said: list[str] = []

    def stray() -> None:
        loss_of(model, batch(7)).backward()

    for number in range(4):
        is_now = number == 1
        if is_now and where == "between windows":
            stray()
        with _noted(said, sync):
            for k, data in enumerate(own_batches(3)):
                with sync.accumulate():
                    if is_now and where == "only":
                        stray()
                        continue
                    if is_now and where == "between micro-batches" and k == 2:
                        stray()
                    sync.backward(loss_of(model, data), count=3)
                    if is_now and where == "behind the last" and k == 2:
                        stray()
            if is_now and where == "only":
                sync.flush()
            sync.unscale_()
            batches = [batch(100 * r + k) for r in range(world) for k in range(3)]
            assert_same(whole_grads(model), right_grads(batches, 9 * world))
            sync.step(optimizer)
    return said


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [("flat", 1, {}), ("nested", 2, {}), ("nested", 2, {"accumulator": "exact"}), ("replicate", 2, {})],
)
def test_a_bare_backward_into_a_sharded_model_is_refused_on_every_rank(ranks, kind, world, options, where):
    for first, said, *after in ranks(world).run(_strays, kind, where, options):
        assert first == "" and after == ["", ""]
        assert "the gradient of 'first.weight'" in said or "the gradient of 'scale'" in said
        assert "micro_batch" in said
        if where != "behind the last":
            assert said.startswith("all ranks: call" if world > 1 else "rank 0: call"), said


def _stray_on_one_rank() -> str:
    """Replicated units need no collective for a second backward of one forward."""
    rank, _ = me()
    sync, model = sharded("replicate")
    with pytest.raises(ValueError) as error:
        for k, data in enumerate(own_batches(3)):
            with sync.accumulate():
                loss = loss_of(model, data)
                if (rank, k) == (1, 1):
                    loss.backward(retain_graph=True)
                sync.backward(loss, count=3)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(bool((p.to_local() == 1).all()) for p in model.parameters())
    return str(error.value)


def test_a_bare_backward_on_one_rank_is_refused_on_all(ranks):
    for said in ranks(2).run(_stray_on_one_rank):
        assert said.startswith("rank 1: call sync.backward(loss) in place of loss.backward()")
