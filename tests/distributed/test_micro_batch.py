"""Micro-batches whose backwards the caller runs, with every owner of gradients."""

from __future__ import annotations

import pytest
import torch
from cases import Integers, assert_same, engine, grads, integers, me, mean_of_integers
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe


def twice(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    loss = forward(x, t)
    with sync.micro_batch(count=n):
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    return 3


def _inputs(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    first, *rest = forward.parameters()
    loss = forward(x, t)
    with sync.micro_batch() as mb:
        loss.backward(inputs=[first], retain_graph=True)
        mb.count = n
        loss.backward(inputs=rest)
    return 1


def _cached(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    """Run each chunk once without a graph, then again with the gradient of its output (GradCache)."""
    with sync.micro_batch(count=torch.tensor(n)):
        pieces = list(zip(x.split(1), t.split(1), strict=True))
        with torch.no_grad():
            outputs = [forward(a, b) for a, b in pieces]
        leaves = torch.stack(outputs).requires_grad_()
        (2 * leaves).sum().backward()
        for (a, b), gradient in zip(pieces, leaves.grad, strict=True):
            forward(a, b).backward(gradient)
    return 2


def _graph(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    loss = forward(x, t)
    with sync.micro_batch(count=n):
        loss.backward(create_graph=True)
        loss.backward()
    return 2


def marked(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    loss = forward(x, t)
    with sync.micro_batch(count=n) as mb:
        loss.backward(retain_graph=True)
        with mb.last_backward(loss):
            (2 * loss).backward()
    return 3


def _marked_only(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    with sync.micro_batch(count=n) as mb, mb.last_backward():
        forward(x, t).backward()
    return 1


def _marked_in_part(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    """The last backward need not produce the gradients that an earlier one has produced."""
    *rest, last = forward.parameters()
    loss = forward(x, t)
    with sync.micro_batch(count=n) as mb:
        loss.backward(inputs=rest, retain_graph=True)
        with mb.last_backward(loss):
            loss.backward(inputs=[last])
    return 1


def _nothing(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    with sync.micro_batch(count=n):
        forward(x, t)
    return 0


def one_line(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    loss = forward(x, t)
    sync.backward(torch.stack([loss, loss]), count=n, gradient=torch.ones(2), retain_graph=True)
    loss.detach()
    return 2


def _one_line_inputs(sync: pe.Sync, forward: nn.Module, x: Tensor, t: Tensor, n: int) -> int:
    sync.backward(forward(x, t), count=n, create_graph=True, inputs=[*forward.parameters()])
    return 1


WAYS = (
    twice,
    marked,
    _inputs,
    _marked_in_part,
    _marked_only,
    _cached,
    one_line,
    _graph,
    _one_line_inputs,
    _nothing,
)


@pytest.mark.parametrize(
    ("kind", "world", "dtype"),
    [
        ("own", 1, torch.float32),
        ("own", 3, torch.bfloat16),
        ("own-native", 2, torch.float32),
        ("own-exact", 3, torch.float32),
        ("attach", 2, torch.bfloat16),
        ("attach-view", 3, torch.float32),
        ("attach-unused", 2, torch.float32),
        ("attach-static", 3, torch.float32),
        ("attach-exact", 2, torch.float32),
    ],
)
@on_ranks()
def test_any_backwards_add_up_to_one_big_batch(kind, dtype):
    """Each rank starts with a different way; windows have two micro-batches, and the last one is short."""
    rank, world = me()
    model = Integers(dtype)
    options = {"accumulator": "exact"} if kind == "attach-exact" else {}
    sync, forward = engine(kind, model, accumulate=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    # A static graph needs a last backward that produces all gradients.
    ways = [way for way in WAYS if kind != "attach-static" or way is not _marked_in_part]
    total = len(ways) | 1

    def batch(r: int, k: int) -> tuple[Tensor, Tensor]:
        return integers(100 * r + k, 1 + (r + k) % 3)

    for number, window in enumerate(sync.windows(range(total))):
        local = []
        for k in window:
            x, t = batch(rank, k)
            local.append(ways[(k + 4 * rank) % len(ways)](sync, forward, x, t, len(x)))
        sync.unscale_()
        everybody: list[list[int]] = [[] for _ in range(world)]
        torch.distributed.all_gather_object(everybody, local)
        ks = range(2 * number, min(2 * number + 2, total))
        members = [(r, k) for r in range(world) for k in ks]
        factors = [factor for factors in everybody for factor in factors]
        batches = [b for m, f in zip(members, factors, strict=True) for b in [batch(*m)] * f]
        want = mean_of_integers(model, batches, sum(len(batch(*m)[0]) for m in members))
        assert_same(grads(model), dict.fromkeys(grads(model)) | want)
        assert sync.step(optimizer)
        model.zero_grad()  # between windows this is harmless


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("is_marked", [True, False])
@on_ranks(2)
def test_buckets_leave_inside_the_backward_that_is_marked_as_the_last(is_marked, accumulate):
    """Collectives are counted when each layer's gradient is ready, and at the end of the block."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    sync = pe.GradSync(model, accumulate=accumulate, bucket_cap_mb=1e-6)
    launched: list[int] = []

    def note(*_: object) -> None:
        if sync._engine.window.header is not None:
            sync._engine.window.header.vector()  # no bucket is launched before the header is received
        launched.append(sync._engine.comm.traffic.collectives)

    windows = []
    for window in sync.windows([torch.ones(3, 4)] * 2 * accumulate):
        for x in window:
            loss = model(x.requires_grad_()).sum()
            launched.clear()
            with sync.micro_batch() as mb:
                loss.backward(retain_graph=True)
                hooks = [layer.register_full_backward_hook(note) for layer in (model[1], model[0])]
                before = sync._engine.comm.traffic.collectives
                again = model(x).sum()
                if is_marked:
                    with mb.last_backward(again):
                        again.backward()
                else:
                    again.backward()
                note()
                for hook in hooks:
                    hook.remove()
        windows.append([count - before for count in launched])
        sync.unscale_()
        model.zero_grad()
    assert len(windows) == 2
    for last_layer, first_layer, body in windows:
        if is_marked:  # the header, then the last layer's bucket before the first layer's gradient is ready
            assert last_layer >= 1 and body >= first_layer > last_layer
        else:
            assert (last_layer, first_layer, body) == (0, 0, 0)


@pytest.mark.parametrize("is_block", [True, False])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_stock_scaler_is_taken_over(kind, is_block):
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    sync.scaler = scaler
    assert sync.scaler is scaler and isinstance(scaler, pe.GradScaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, window in enumerate(sync.windows([integers(10 * rank + k, 4) for k in range(4)])):
        for x, t in window:
            loss = forward(x, t)
            if is_block:
                with sync.micro_batch(count=4) as mb, mb.last_backward():
                    scaler.scale(loss).backward()
            else:
                sync.backward(loss, count=4)
        for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
            with pytest.raises(RuntimeError, match="the engine does the work of scaler"):
                call()
        sync.unscale_()
        batches = [integers(10 * r + 2 * number + k, 4) for r in range(world) for k in range(2)]
        assert_same(grads(model), mean_of_integers(model, batches, 8 * world))
        assert sync.step(optimizer)
        assert scaler.get_scale() == 8.0 * 2 ** (number + 1)


@on_ranks(2)
def test_losses_that_were_not_scaled_are_refused():
    model = Integers(torch.float32)
    sync = pe.GradSync(model, accumulate=2)
    sync.scaler = pe.GradScaler("cpu")
    with pytest.raises(ValueError, match="the losses of micro-batch 0 were not scaled"):
        for k in range(2):
            with sync.accumulate(), sync.micro_batch():
                model(*integers(k)).backward()
