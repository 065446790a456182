"""Gradients that other code writes, and blocks that end with an exception, are refused on every rank."""

from __future__ import annotations

import contextlib

import pytest
import torch
from cases import (
    Breaks,
    Integers,
    assert_same,
    engine,
    grads,
    integers,
    me,
    mean_of_integers,
    records_of,
)
from ranks import on_ranks
from torch import nn
from window_errors import noted

import pyengine as pe


def _bare(forward: nn.Module) -> None:
    forward(*integers(7)).backward()


def _bare_in_part(forward: nn.Module) -> None:
    forward(*integers(7)).backward(inputs=[next(forward.parameters())])


def _replaced(forward: nn.Module) -> None:
    """Clear and recompute gradients: hard to notice, because address and number of writes may be the same."""
    forward.zero_grad()
    _bare(forward)


def _zeroed_in_place(forward: nn.Module) -> None:
    forward.zero_grad(set_to_none=False)


def _scaled(forward: nn.Module) -> None:
    for param in forward.parameters():
        param.grad.mul_(0.5)


def _unscaled_by_our_op(forward: nn.Module) -> None:
    pe.ops.unscale_norm_([param.grad for param in forward.parameters()], 0.5)


def _unflattened(forward: nn.Module) -> None:
    written = [param.grad for param in forward.parameters()]
    pe.ops.unflatten_(written, 2 * pe.ops.flatten(written))


def _cleared_in_part(forward: nn.Module) -> None:
    """Clear one gradient, as when only one of two optimizers clears its gradients."""
    {name.rpartition(".")[2]: param for name, param in forward.named_parameters()}["matrix"].grad = None


# What is done, and before which micro-batch.
ANYWHERE = [(_bare, 0), (_bare, 1), (_bare_in_part, 2), (_replaced, 1)]
IN_GRAD = [(nn.Module.zero_grad, 1), (_zeroed_in_place, 1), (_scaled, 1), (_unscaled_by_our_op, 1)]
IN_GRAD += [(_unflattened, 1), (_cleared_in_part, 1), (_cleared_in_part, 2)]  # if sums are in `.grad`
CASES = [(kind, *write) for kind in ("own", "own-native", "attach-view") for write in ANYWHERE]
CASES += [("own-exact", _bare, 1), ("attach", _bare, 1)]
CASES += [(kind, *write) for kind in ("own-native", "attach-view") for write in IN_GRAD]


@pytest.mark.parametrize(
    ("kind", "write", "before", "is_block"), [(*case, bool(n % 2)) for n, case in enumerate(CASES)]
)
@on_ranks(2)
def test_a_gradient_that_somebody_else_writes_is_refused_on_every_rank(kind, write, before, is_block):
    """With DDP the write is in the third window: in the second one, DDP's new buckets would hide it."""
    rank, world = me()
    at = 2 if kind.startswith("attach") else 1
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors: list[str] = []
    for number in range(at + 2):
        with noted(errors, sync):
            for k in range(3):
                if (number, rank, k) == (at, 1, before):
                    write(forward)
                with sync.accumulate():
                    x, t = integers(10 * rank + k)
                    if is_block:
                        with sync.micro_batch(count=3):
                            forward(x, t).backward()
                    else:
                        sync.backward(forward(x, t), count=3)
            sync.unscale_()
            batches = [integers(10 * r + k) for r in range(world) for k in range(3)]
            assert_same(grads(model), mean_of_integers(model, batches, 9 * world))
            sync.step(optimizer)
    *earlier, refused, after = errors
    assert not any(earlier) and after == ""
    assert refused.startswith("rank 1: ")
    assert "the gradient of 'matrix'" in refused and "micro_batch" in refused


@pytest.mark.parametrize("kind", ["own-native", "attach-view"])
@on_ranks(2)
def test_a_hook_may_replace_the_gradient_that_it_gets(kind):
    model = Integers(torch.float32)
    mask = torch.tensor([1.0, 0.0, 1.0])
    model.matrix.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad * mask))
    sync, forward = engine(kind, model, accumulate=3)
    for _ in range(2):
        for k in range(3):
            with sync.accumulate():
                sync.backward(forward(*integers(k)), count=3)
        sync.unscale_()
        want = mean_of_integers(model, [integers(k) for k in range(3)], 9)
        assert_same(grads(model), {**want, "matrix": want["matrix"] * mask})
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("kind", ["own", "own-native", "attach"])
@on_ranks(2)
def test_a_backward_behind_the_windows_last_one_is_refused(kind):
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = "after the window's end"
    for number, window in enumerate(sync.windows([integers(k) for k in range(2)])):
        if number == 0:
            with pytest.raises(RuntimeError, match=message):
                for x, t in window:
                    sync.backward(forward(x, t))
                    forward(x, t).backward()
            with pytest.raises(RuntimeError, match=message):
                sync.step(optimizer)
            sync.abandon()
            assert all(bool((p == 1).all()) for p in model.parameters())
        else:
            for x, t in window:
                sync.backward(forward(x, t))
            assert sync.step(optimizer)


def _block(forward: nn.Module, mb: pe.MicroBatch, phase: str | bool) -> None:
    def fail(here: str) -> None:
        if phase == here:
            raise MemoryError("no room for a gradient")

    fail("forward")
    loss = Breaks.apply(forward(*integers(3)))
    Breaks.now = phase == "first backward"
    loss.backward(retain_graph=True)
    fail("between")
    with mb.last_backward(loss):
        Breaks.now = phase == "last backward"
        loss.backward()
    fail("behind")


@pytest.mark.parametrize("phase", ["forward", "first backward", "between", "last backward", "behind"])
@pytest.mark.parametrize(("kind", "at"), [("own", 1), ("own", 2), ("attach", 2)])
@on_ranks(2)
def test_a_block_left_by_an_exception_is_used_whole_or_not_at_all(kind, phase, at):
    """Rank 1 leaves block `at` of the second of three windows, and continues as if nothing had happened."""
    rank, _ = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    records = records_of(sync)
    errors: list[str] = []
    for number, window in enumerate(sync.windows(range(9))):
        with noted(errors, sync):
            for k in window:
                fails = (number, rank, k % 3) == (1, 1, at)
                with contextlib.suppress(MemoryError), sync.micro_batch(count=3) as mb:
                    _block(forward, mb, fails and phase)
            sync.step(optimizer)
    Breaks.now = False
    reasons = [record.reason for record in records if record.skipped]
    if at == 2 and phase == "behind":  # everything had been sent
        assert (errors, reasons) == (["", "", ""], [])
    elif at == 2 and phase == "last backward":
        assert errors == ["", "", ""]
        assert reasons == ["rank 1 gave up the window: MemoryError('no room for a gradient')"]
    else:
        assert errors[0] == errors[2] == "" and reasons == []
        assert f"rank 1: micro-batch {at} was left by an exception (MemoryError" in errors[1]


@pytest.mark.parametrize("kind", ["own", "attach-view"])
@on_ranks(2)
def test_a_gradient_behind_the_marked_backward_is_an_error(kind):
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def block(late_in: int) -> None:
        for k in range(2):
            with sync.accumulate():
                loss = forward(*integers(k))
                with sync.micro_batch() as mb:
                    with mb.last_backward(loss):
                        loss.backward(retain_graph=True)
                    if k == late_in:
                        loss.backward()

    # Before anything was sent, every rank raises.
    with pytest.raises(
        ValueError, match=r"all ranks: a gradient was accumulated after mb\.last_backward of micro-batch 0"
    ):
        block(late_in=0)
    sync.abandon()
    with pytest.raises(RuntimeError, match=r"was accumulated after mb\.last_backward of micro-batch 1"):
        block(late_in=1)
    block(late_in=2)
    assert sync.step(optimizer)


@on_ranks(1)
def test_wrong_calls_are_refused_and_change_nothing():
    model = Integers(torch.float32)
    sync = pe.GradSync(model, accumulate=2)
    batch = integers(1)
    with pytest.raises(RuntimeError, match="backward outside a window"), sync.micro_batch():
        pass
    with sync.accumulate(), sync.micro_batch(count=3) as mb:
        loss = model(*batch)
        for call in (sync.flush, sync.state_dict, sync.unscale_, sync.abandon):
            with pytest.raises(RuntimeError, match="micro-batch"):
                call()
        with pytest.raises(RuntimeError, match="backward while another backward"):
            sync.backward(loss)
        with pytest.raises(TypeError, match="mb.loss is a str"):
            mb.loss = "3"
        with pytest.raises(ValueError, match=r"mb.loss has shape \[2\]"):
            mb.loss = torch.ones(2)
        with pytest.raises(TypeError, match="count"):
            mb.count = None
        with mb.last_backward():
            loss.backward()
        with pytest.raises(RuntimeError, match="mb.last_backward was called a second"), mb.last_backward():
            pass
        with pytest.raises(RuntimeError, match="mb.count is set after"):
            mb.count = 2
    vector = model(*batch) * torch.ones(2)
    for wrong, needed in [
        ({"loss": vector}, "expected a 0-dim tensor"),
        ({"loss": vector, "gradient": torch.ones(3)}, r"gradient has shape \[3\]"),
        ({"loss": vector.sum(), "inputs": []}, "inputs: expected at least one"),
        ({"loss": vector.sum().detach()}, "loss does not require a gradient"),
    ]:
        with pytest.raises(ValueError, match=needed):
            sync.backward(**wrong)
    with sync.accumulate():
        sync.backward(vector.sum())  # the refused calls have run no backward
    assert sync.step(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("given", "want"), [("all", 1.5), ("tensor", 1.5), ("none", None), ("one rank", None)]
)
@on_ranks(2)
def test_the_record_has_a_loss_where_every_block_has_one(given, want):
    rank, _ = me()
    model = Integers(torch.float32)
    sync = pe.GradSync(model, accumulate=2)
    records = records_of(sync)
    for window in sync.windows([integers(k) for k in range(4)]):
        for x, t in window:
            with sync.micro_batch(count=2) as mb:
                loss = model(x, t)
                loss.backward()
                if given == "all" or (given == "one rank" and rank == 0):
                    mb.loss = 3.0
                if given == "tensor":
                    mb.loss = loss - loss + 3
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    sync.synchronize()
    assert [record.loss for record in records] == [want, want]
