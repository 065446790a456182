"""Gradients that somebody else writes in mid-window, and blocks that end in an exception: refused on every
rank, never lost or added in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from cases import Breaks, Integers, assert_same, engine, grads, integers, me, mean_of_integers
from torch import Tensor, nn

import pyengine as pe


def _bare_before(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 0:
        forward(*integers(7)).backward()


def _bare_between(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 1:
        forward(*integers(7)).backward()


def _in_part(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 2:
        forward(*integers(7)).backward(inputs=[next(forward.parameters())])


def _replaced(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    """The worst: gone and come again, maybe at the same address, with as many writes."""
    if k == 1:
        forward.zero_grad()
        forward(*integers(7)).backward()


ANYWHERE = (_bare_before, _bare_between, _in_part, _replaced)


def _zeroed(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 1:
        forward.zero_grad()


def _zeroed_in_place(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 1:
        forward.zero_grad(set_to_none=False)


def _scaled(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 1:
        for param in forward.parameters():
            param.grad.mul_(0.5)


def _unscaled_by_our_op(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 1:
        pe.ops.unscale_norm_([param.grad for param in forward.parameters()], 0.5)


def _unflattened(sync: pe.Sync, forward: nn.Module, k: int) -> None:
    if k == 1:
        written = [param.grad for param in forward.parameters()]
        pe.ops.unflatten_(written, 2 * pe.ops.flatten(written))


IN_GRAD = (_zeroed, _zeroed_in_place, _scaled, _unscaled_by_our_op, _unflattened)  # where sums are in `.grad`


def _refused(kind: str, write: Callable[[pe.Sync, nn.Module, int], None], is_block: bool) -> list[str]:
    """Return what the four windows raise; gradients are written on rank 1, in the third. (In the second DDP
    gives views of its buckets other memory, so that what came before it is not noticed.)
    """
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    said = []
    for number in range(4):
        try:
            for k in range(3):
                if (number, rank) == (2, 1 % world):
                    write(sync, forward, k)
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
            said.append("")
        except ValueError as error:
            said.append(str(error))
            sync.abandon()
    return said


CASES = [(kind, write) for kind in ("own", "own-native", "attach-view") for write in ANYWHERE]
CASES += [("own-exact", _bare_between), ("attach", _bare_between)]
CASES += [(kind, write) for kind in ("own-native", "attach-view") for write in IN_GRAD]


@pytest.mark.parametrize(
    ("kind", "write", "is_block"), [(*case, bool(number % 2)) for number, case in enumerate(CASES)]
)
def test_a_gradient_that_somebody_else_writes_is_refused_on_every_rank(ranks, kind, write, is_block):
    for *before, said, after in ranks(2).run(_refused, kind, write, is_block):
        assert before == ["", ""] and after == ""
        assert said.startswith("rank 1: ") and "the gradient of 'matrix'" in said and "micro_batch" in said


def _only_bare(kind: str) -> str:
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    with pytest.raises(ValueError, match="the gradient of 'matrix'") as raised:
        for window in sync.windows([integers(k) for k in range(2)]):
            for x, t in window:
                forward(x, t).backward()
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(bool((p == 1).all()) for p in model.parameters())
    return str(raised.value)


@pytest.mark.parametrize(("kind", "world"), [("own", 1), ("own-exact", 3), ("attach", 3)])
def test_a_loop_of_bare_backwards_is_refused(ranks, kind, world):
    for said in ranks(world).run(_only_bare, kind):
        assert said.startswith("rank 0: " if world == 1 else "all ranks: ")


def _between_send_and_step(kind: str) -> None:
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = "behind the window's end"
    for number, window in enumerate(sync.windows([integers(k) for k in range(2)])):
        if number == 0:
            with pytest.raises(RuntimeError, match=said):
                for x, t in window:
                    sync.backward(forward(x, t))
                    forward(x, t).backward()
            with pytest.raises(RuntimeError, match=said):
                sync.step(optimizer)
            sync.abandon()
            assert all(bool((p == 1).all()) for p in model.parameters())
        else:
            for x, t in window:
                sync.backward(forward(x, t))
            assert sync.step(optimizer)


@pytest.mark.parametrize("kind", ["own", "own-native", "attach"])
def test_a_backward_behind_the_windows_last_one_is_refused(ranks, kind):
    ranks(2).run(_between_send_and_step, kind)


PHASES = ("forward", "first backward", "between", "last backward", "behind")


def _leaves_a_block(kind: str, phase: str, at: int) -> tuple[list[str], list[str]]:
    """Return what every window raises where it is used, and why steps were skipped; rank 1 leaves its block
    number `at` of the second of three windows, and goes on as if nothing had happened.
    """
    rank, _ = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    said = []
    for number, window in enumerate(sync.windows(range(9))):
        try:
            for k in window:
                fails = (number, rank, k % 3) == (1, 1, at)
                with contextlib.suppress(MemoryError), sync.micro_batch(count=3) as mb:
                    _block(forward, mb, fails and phase)
            sync.step(optimizer)
            said.append("")
        except ValueError as error:
            said.append(str(error))
            sync.abandon()
    Breaks.now = False
    return said, [record.reason for record in records if record.skipped]


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


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["own", "attach"])
def test_a_block_left_by_an_exception_is_used_whole_or_not_at_all(ranks, kind, phase, at):
    for said, reasons in ranks(2).run(_leaves_a_block, kind, phase, at):
        if at == 2 and phase == "behind":  # everything was on its way
            assert (said, reasons) == (["", "", ""], [])
        elif at == 2 and phase == "last backward":
            assert said == ["", "", ""]
            assert reasons == ["rank 1 gave the window up: MemoryError('no room for a gradient')"]
        else:
            assert said[0] == said[2] == "" and reasons == []
            assert f"rank 1: micro-batch {at} was left by an exception (MemoryError" in said[1]


def _late(kind: str) -> None:
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
        ValueError, match=r"all ranks: a gradient came after mb\.last_backward of micro-batch 0"
    ):
        block(late_in=0)
    sync.abandon()
    with pytest.raises(RuntimeError, match=r"came after mb\.last_backward of micro-batch 1"):
        block(late_in=1)
    block(late_in=2)
    assert sync.step(optimizer)


@pytest.mark.parametrize("kind", ["own", "attach-view"])
def test_a_gradient_behind_the_marked_backward_is_an_error(ranks, kind):
    ranks(2).run(_late, kind)


def _wrong_calls() -> None:
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
        with pytest.raises(TypeError, match="mb.loss = a str"):
            mb.loss = "3"
        with pytest.raises(ValueError, match=r"mb.loss has shape \[2\]"):
            mb.loss = torch.ones(2)
        with pytest.raises(TypeError, match="count"):
            mb.count = None
        with mb.last_backward():
            loss.backward()
        with pytest.raises(RuntimeError, match="mb.last_backward: the second one"), mb.last_backward():
            pass
        with pytest.raises(RuntimeError, match="mb.count is set after"):
            mb.count = 2
    vector = model(*batch) * torch.ones(2)
    for wrong, needed in [
        ({"loss": vector}, "need a 0-dim tensor"),
        ({"loss": vector, "gradient": torch.ones(3)}, r"gradient has shape \[3\]"),
        ({"loss": vector.sum(), "inputs": []}, "inputs: need at least one"),
        ({"loss": vector.sum().detach()}, "requires no gradient"),
    ]:
        with pytest.raises(ValueError, match=needed):
            sync.backward(**wrong)
    with sync.accumulate():
        sync.backward(vector.sum())  # nothing has run yet
    assert sync.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_wrong_calls_are_refused_and_change_nothing(ranks):
    ranks(1).run(_wrong_calls)


def _records(given: str) -> list[float | None]:
    rank, _ = me()
    model = Integers(torch.float32)
    sync = pe.GradSync(model, accumulate=2)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
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
    return [record.loss for record in records]


@pytest.mark.parametrize(
    ("given", "loss"), [("all", 1.5), ("tensor", 1.5), ("none", None), ("one rank", None)]
)
def test_the_record_has_a_loss_where_every_block_has_one(ranks, given, loss):
    assert ranks(2).run(_records, given) == [[loss, loss]] * 2


def _resumed(has_loss: bool) -> None:
    def made() -> tuple[Integers, pe.Sync]:
        model = Integers(torch.float32)
        return model, pe.GradSync(model, accumulate=2)

    def run(sync: pe.Sync, model: Integers, ks: list[int]) -> None:
        for k in ks:
            with sync.accumulate(), sync.micro_batch(count=3) as mb:
                loss = model(*integers(k))
                loss.backward()
                mb.loss = loss if has_loss else None

    model, sync = made()
    run(sync, model, [0])
    state = sync.state_dict()
    run(sync, model, [1])
    sync.unscale_()
    want = grads(model)
    sync.close()
    model, sync = made()
    sync.load_state_dict(state)
    run(sync, model, [1])
    sync.unscale_()
    assert_same(grads(model), want)
    model(*integers(1)).backward()  # which is mine now, and kept
    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    run(sync, model, [2])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="state_dict: no step could use window 1"):
        sync.state_dict()


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_window_of_blocks_is_saved_and_resumed(ranks, has_loss):
    ranks(2).run(_resumed, has_loss)


class _Fused(torch.autograd.Function):
    """The sum of a weight's elements, whose backward adds to `main_grad` by itself."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.float().sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        ctx.weight.main_grad.add_(grad)
        ctx.weight.grad_added_to_main_grad = True


def _stray_in_main_grad(dtype: torch.dtype, at: str) -> list[str]:
    """Return what four windows of three raise; rank 1 adds to `main_grad` past the engine in the second."""
    rank, world = me()
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    sync = pe.GradSync(model, accumulate=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    said = []
    for number in range(4):
        if (number, rank, at) == (1, 1 % world, "between windows"):
            _Fused.apply(model.weight).backward()
        try:
            for k in range(3):
                with sync.accumulate():
                    if (number, rank, k, at) == (1, 1 % world, 2, "between micro-batches"):
                        _Fused.apply(model.weight).backward()
                    sync.backward(_Fused.apply(model.weight))
            sync.unscale_()
            assert bool((model.weight.grad == 1).all())
            sync.step(optimizer)
            said.append("")
        except ValueError as error:
            said.append(str(error))
            sync.abandon()
    return said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", ["between windows", "between micro-batches"])
def test_what_a_layer_adds_to_main_grad_past_the_engine_is_refused_everywhere(ranks, dtype, at):
    for first, said, *after in ranks(2).run(_stray_in_main_grad, dtype, at):
        assert first == "" and after == ["", ""]
        assert said.startswith("rank 1: ") and f"the gradient of 'weight' was written to {at}" in said
