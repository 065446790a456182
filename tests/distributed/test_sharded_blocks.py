"""FSDP2 with micro-batches whose backwards the caller runs, and with gradients that bypass the engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import assert_same, me
from marks import rest
from ranks import on_ranks
from sharded_cases import (
    PLAN,
    batch,
    items,
    loss_of,
    own_batches,
    right_grads,
    right_window,
    sharded,
    whole_grads,
)
from test_micro_batch import marked, one_line, twice
from torch import Tensor, nn
from window_errors import noted

import pyengine as pe


@dataclass
class Loss:
    """The loss of a sharded model."""

    model: nn.Module

    def __call__(self, x: Tensor, t: Tensor, *, extra: bool = False) -> Tensor:
        return loss_of(self.model, (x, t), extra=extra)


def _beside_grad(sync: pe.Sync, forward: Loss, x: Tensor, t: Tensor, n: int) -> None:
    """Call `torch.autograd.grad`, whose results are not added to the window and are not refused either."""
    loss, other = forward(x, t), forward(x, t, extra=True) * torch.inf
    scale, sometimes = forward.model.scale, forward.model.sometimes  # unsharded by the forward
    torch.autograd.grad(other, [scale, sometimes])
    torch.autograd.grad(loss, scale, retain_graph=True)
    sync.backward(loss, count=n)


def _chunks(sync: pe.Sync, forward: Loss, x: Tensor, t: Tensor, n: int) -> None:
    """Run the same number of forwards on every rank, each over some of the rows."""
    with sync.micro_batch() as mb:
        for a, b in zip(x.tensor_split(2), t.tensor_split(2), strict=True):
            forward(a, b).backward()
        mb.count = n


def _cached(sync: pe.Sync, forward: Loss, x: Tensor, t: Tensor, n: int) -> None:
    """Run the forward once without a graph, then again with the gradient of its output (GradCache)."""
    with sync.micro_batch(count=n) as mb:
        with torch.no_grad():
            leaf = forward(x, t)
        (2 * leaf.requires_grad_()).backward()
        with mb.last_backward():
            forward(x, t).backward(leaf.grad)


def _several(sync: pe.Sync, forward: Loss, x: Tensor, t: Tensor, n: int) -> None:
    """Run backwards of several losses over one graph."""
    with sync.micro_batch(count=n):
        out = forward.model(x).to(t.dtype)
        (out * t).sum().backward(retain_graph=True)
        (out * t * 2).sum().backward()


# How often each way adds a micro-batch's gradient. Rank r has PLAN[r] micro-batches, each of another way.
WAYS = {twice: 3, _beside_grad: 1, marked: 3, _chunks: 1, _cached: 2, _several: 3, one_line: 2}


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("flat", 1, {}),
        ("flat", 3, {}),
        ("nested", 2, {"nonfinite": "raise"}),
        ("nested", 2, {"defer": "none"}),
        ("nested", 2, {"accumulator": "exact"}),
        ("hsdp", 4, {"defer": "outer", "narrow": True}),
        ("replicate", 2, {"narrow": True}),
        ("replicate", 2, {"accumulator": "exact"}),
        *rest(("nested", 4, {"narrow": True}), ("nested", 2, {"defer_budget_mb": 1.0}), ("hsdp", 4, {})),
    ],
    ids=str,
)
@on_ranks()
def test_any_backwards_over_a_sharded_model_add_up_to_one_big_batch(kind, options):
    """Ranks have different numbers of micro-batches but go the same ways, as forwards are collective."""
    rank, world = me()
    sync, model = sharded(kind, accumulate=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    done = 0
    for window in sync.windows(range(PLAN[rank])):
        first = done
        for k in window:
            n = items(rank, k)
            [*WAYS][done](sync, Loss(model), *batch(100 * rank + k, n), n)
            done += 1
        norm = sync.grad_norm()
        sync.unscale_()
        members = [(r, k) for r in range(world) for k in range(first, min(done, PLAN[r]))]
        batches = [batch(100 * r + k, items(r, k)) for r, k in members for _ in range([*WAYS.values()][k])]
        want = right_grads(batches, sum(items(*m) for m in members))
        assert_same(whole_grads(model), want)
        squares = sum(grad.double().square().sum() for grad in want.values() if grad is not None)
        # After the norm was computed, every product with 1/count was rounded to float32.
        torch.testing.assert_close(norm, squares.sqrt(), rtol=2**-23, atol=0)
        assert sync.step(optimizer)
        model.zero_grad()
    assert done == max(PLAN[:world]) == len(WAYS)


@pytest.mark.parametrize("where", ["between windows", "between micro-batches", "behind the last"])
@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [("flat", 1, {}), ("nested", 2, {}), ("nested", 2, {"accumulator": "exact"}), ("replicate", 2, {})],
)
@on_ranks()
def test_a_bare_backward_into_a_sharded_model_is_refused_on_every_rank(kind, world, options, where):
    sync, model = sharded(kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors: list[str] = []

    def stray(number: int, here: str) -> None:
        if (number, here) == (1, where):
            loss_of(model, batch(7)).backward()

    for number in range(4):
        stray(number, "between windows")
        with noted(errors, sync):
            for k, data in enumerate(own_batches(3)):
                with sync.accumulate():
                    if k == 2:
                        stray(number, "between micro-batches")
                    sync.backward(loss_of(model, data), count=3)
                    if k == 2:
                        stray(number, "behind the last")
            sync.unscale_()
            assert_same(whole_grads(model), right_window())
            sync.step(optimizer)
    first, message, *after = errors
    assert first == "" and after == ["", ""]
    assert "the gradient of 'first.weight'" in message or "the gradient of 'scale'" in message
    assert "micro_batch" in message
    if where != "behind the last":
        assert message.startswith("all ranks: call" if world > 1 else "rank 0: call"), message


@on_ranks(2)
def test_a_bare_backward_on_one_rank_is_refused_on_all():
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
    assert str(error.value).startswith("rank 1: call sync.backward(loss) in place of loss.backward()")


@on_ranks(2)
def test_a_forward_inside_a_transform_of_torch_func_counts():
    sync, model = sharded("flat", accumulate=1)
    x, t = batch(me()[0])
    with sync.accumulate():
        loss, _ = torch.func.jvp(lambda x: loss_of(model, (x, t)), (x,), (torch.ones_like(x),))
        sync.backward(loss, count=3)
    sync.unscale_()
    assert_same(whole_grads(model), right_grads([batch(0), batch(1)], 6))
