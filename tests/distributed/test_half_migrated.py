"""What is left of an old loop is an error or a warning that begins with the remedy."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import Integers, engine, error_of, integers, recorded_warnings
from ranks import on_ranks
from sharded_cases import Chain, batch, loss_of, shard
from torch import Tensor, nn

import pyengine as pe

KINDS = ("own", "own-native", "own-exact", "attach", "attach-view", "flat", "replicate")
REMEDY = "call sync.backward(loss) in place of loss.backward()"
Loss = Callable[[int], Tensor]


def _made(kind: str, accumulate: int = 2) -> tuple[pe.Sync, nn.Module, Loss]:
    if kind in ("flat", "replicate"):
        model = shard(Chain(), kind)
        return pe.attach(model, accumulate=accumulate), model, lambda k: loss_of(model, batch(k))
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=accumulate)
    return sync, model, lambda k: forward(*integers(k))


def _in_windows(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for window in sync.windows(range(4)):
        for k in window:
            loss(k).backward()
        sync.step(optimizer)


def _in_windows_with_a_bare_step(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for window in sync.windows(range(4)):
        for k in window:
            loss(k).backward()
        optimizer.step()


def _in_accumulate(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for k in range(2):
        with sync.accumulate():
            loss(k).backward()
    sync.step(optimizer)


def _before_a_wrapped_step(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    wrapped = sync.wrap(optimizer)
    for k in range(4):
        loss(k).backward()
        wrapped.step()
        wrapped.zero_grad()


def _before_a_step(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for k in range(4):
        loss(k).backward()
        sync.step(optimizer)


def _before_clipping(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    loss(0).backward()
    sync.clip_grad_norm_(1.0)


def _behind_windows(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    """A second phase whose loop was forgotten."""
    wrapped = sync.wrap(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0  # the first phase leaves the parameters alone, too
    for window in sync.windows(range(4)):
        for k in window:
            sync.backward(loss(k))
        wrapped.step()
    _before_a_wrapped_step(sync, optimizer, loss)


LOOPS = (
    _in_windows,
    _in_windows_with_a_bare_step,
    _in_accumulate,
    _before_a_wrapped_step,
    _before_a_step,
    _before_clipping,
    _behind_windows,
)
CASES = [(kind, loop) for kind in KINDS for loop in LOOPS]


@pytest.mark.parametrize(("kind", "loop"), CASES[::4])  # each kind and each loop comes with another one
@on_ranks(2)
def test_a_bare_backward_is_answered_by_its_remedy_and_steps_nothing(kind, loop):
    sync, model, loss = _made(kind)
    before = [param.detach().clone() for param in model.parameters()]
    text = error_of(loop, sync, torch.optim.SGD(model.parameters(), lr=0.5), loss)
    if loop is not _in_windows_with_a_bare_step:  # whose first step is the caller's own
        assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    sync.abandon()
    assert text.removeprefix("all ranks: ").startswith(REMEDY)
    assert text.count(REMEDY) == 1


@pytest.mark.parametrize("kind", ["own", "attach", "flat"])
@on_ranks(2)
def test_a_loop_that_does_not_know_its_engine_is_warned_once(kind):
    sync, model, loss = _made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with recorded_warnings() as texts:
        for k in range(4):
            loss(k).backward()
            optimizer.step()
            optimizer.zero_grad()
    sync.close()
    (text,) = texts
    assert text.startswith(REMEDY)


@on_ranks(1)
def test_backwards_beside_windows_that_train_nothing_are_none_of_our_business():
    """A check before the loop, a discriminator's share of the generator's loss."""
    sync, model, loss = _made("own")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with recorded_warnings() as texts:
        for window in range(3):
            for _ in range(2):
                loss(7).backward()
                model.zero_grad()
            for k in range(2):
                with sync.accumulate():
                    sync.backward(loss(2 * window + k))
            sync.step(optimizer)
        loss(7).backward()
        model.zero_grad()
        sync.wrap(optimizer).step()
    assert texts == []


def _warned(
    loss_of: Callable[[nn.Parameter], Tensor],
    *,
    count: int | None = None,
    is_block: bool = False,
    accumulate: int = 4,
) -> list[str]:
    weight = nn.Parameter(torch.ones(3, 2))
    with pe.GradSync([weight], accumulate=accumulate) as sync, recorded_warnings() as texts:
        for window in sync.windows(range(3 * accumulate)):
            for _ in window:
                loss = loss_of(weight)
                if is_block:
                    with sync.micro_batch(count=count) as mb:
                        mb.backward(loss)
                else:
                    sync.backward(loss, count=count)
            sync.step(torch.optim.SGD([weight], lr=0.0))
    return texts


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "half of a squared error": lambda weight: 0.5 * weight.square().mean(),
    "mean of two": lambda weight: (weight.sum() + weight.exp().sum()) / 2,
    "GAN": lambda weight: (
        (nn.functional.softplus(weight[0]).mean() + nn.functional.softplus(weight[1]).mean()) / 2
    ),
    "VAE": lambda weight: weight.square().sum() - 0.5 * (1 + weight - weight.square() - weight.exp()).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_factors_that_belong_to_a_loss_are_not_warned_of(name):
    assert _warned(LOSSES[name], accumulate=2) == []


@pytest.mark.parametrize(
    ("reduction", "count", "says"),
    [
        ("sum", None, "pass the number of its items, count="),
        ("mean", 3, "leave count= out"),
        ("sum", 3, ""),
        ("mean", None, ""),
        ("mean", 1, ""),
    ],
)
def test_a_sum_without_its_count_and_a_mean_with_one_are_warned_of_once(reduction, count, says):
    target = torch.zeros(3, dtype=torch.int64)
    loss_of = partial(nn.functional.cross_entropy, target=target, reduction=reduction)
    texts = _warned(loss_of, count=count)
    assert [text.startswith(says) for text in texts] == ([True] if says else [])


class _Held:
    """An engine, a scaler and a weight of which a loss is made."""

    def __init__(self, kind: str) -> None:
        gc.collect()  # a stock scaler's copies for a list are known until the next collection
        self.weight = nn.Parameter(torch.ones(3))
        self.sync = pe.GradSync([self.weight], accumulate=2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        if kind == "its own":
            self.sync.scaler = self.scaler
        elif kind == "another":
            self.sync.scaler = pe.GradScaler("cpu", init_scale=8.0)
        elif kind == "another engine's":
            self.scaler = pe.GradScaler("cpu", init_scale=64.0)

    def loss(self) -> Tensor:
        return self.weight.square().sum()


SCALERS = ("its own", "another", "none", "another engine's")
SCALED: dict[str, Callable[[torch.amp.GradScaler, Callable[[], Tensor]], Tensor]] = {
    "scaled": lambda scaler, loss: scaler.scale(loss()),
    "of a list": lambda scaler, loss: scaler.scale([loss(), loss()])[1],
    "of an iterator": lambda scaler, loss: next(iter(scaler.scale(each() for each in [loss]))),
    "sum": lambda scaler, loss: scaler.scale(loss()) + scaler.scale(loss()),
    "sum of a list": lambda scaler, loss: torch.stack(scaler.scale([loss() for _ in range(20)])).sum(),
    "divided": lambda scaler, loss: scaler.scale(loss()) / 2,
    "times a count": lambda scaler, loss: scaler.scale(loss() / 2) * 3,
    "in double": lambda scaler, loss: scaler.scale(loss()).double(),
    "plus an auxiliary loss": lambda scaler, loss: loss() + 0.1 * scaler.scale(loss()),
    "twice": lambda scaler, loss: scaler.scale(scaler.scale(loss())),
}


def _give(sync: pe.Sync, loss: Tensor, how: str) -> None:
    if how == "backward":
        sync.backward(loss, count=3)
    elif how == "wide":
        sync.backward(loss.expand(2), gradient=torch.ones(2))
    elif how == "retry":
        sync.retry_smaller(torch.ones(3), lambda part: (loss, len(part)))
    else:
        with sync.micro_batch(count=3) as mb:
            mb.backward(loss)


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [
        (kind, name, ("backward", "block", "wide", "retry")[(i + j) % 4])
        for i, kind in enumerate(SCALERS)
        for j, name in enumerate(SCALED)
    ],
)
def test_a_loss_that_was_scaled_is_refused_before_anything_runs(kind, name, how):
    held = _Held(kind)
    first = (
        "assign the scaler once" if held.sync.scaler is None else "pass the loss itself, sync.backward(loss)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(first)}"), held.sync.accumulate():
        _give(held.sync, SCALED[name](held.scaler, held.loss), how)
    assert held.weight.grad is None
    held.sync.close()


@pytest.mark.parametrize("kind", ["none", "another engine's"])
def test_a_marked_backward_of_a_scaled_loss_is_refused_where_nobody_unscales(kind):
    held = _Held(kind)
    with pytest.raises(ValueError, match="^assign the scaler once"), held.sync.accumulate():
        loss = held.scaler.scale(held.loss())
        with held.sync.micro_batch() as mb, mb.last_backward(loss):
            loss.backward()
    held.sync.close()


def test_a_scaled_loss_is_refused_in_later_windows_and_among_several_losses():
    held = _Held("its own")
    seen = []
    with held.sync, pytest.raises(ValueError, match="^pass the loss itself"):
        for window in held.sync.windows(range(4), count=lambda _: {"a": 1, "b": 2}):
            for k in window:
                seen.append(k)
                loss = held.scaler.scale(held.loss()) if k == 2 else held.loss()
                held.sync.backward({"a": held.loss(), "b": loss})
            held.sync.step(torch.optim.SGD([held.weight], lr=0.0))
    assert seen == [0, 1, 2]


WEIGHT = torch.tensor(64.0)
WEIGHTS = {WEIGHT.device: torch.tensor(64.0)}
CONSTANTS: dict[str, Callable[[Tensor, torch.amp.GradScaler], Tensor]] = {
    "a number": lambda loss, scaler: loss * 64.0,
    "a tensor that others keep": lambda loss, scaler: loss * WEIGHT,
    "a tensor": lambda loss, scaler: torch.tensor(64.0) * loss,
    "a tensor by device": lambda loss, scaler: loss * WEIGHTS[loss.device],
    "a loss": lambda loss, scaler: loss * loss.detach(),
    "a disabled scaler": lambda loss, scaler: torch.amp.GradScaler("cpu", enabled=False).scale(loss),
    "a scaled loss without its graph": lambda loss, scaler: loss + scaler.scale(loss).detach(),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("kind", SCALERS)
def test_other_factors_of_a_loss_are_not_taken_for_a_scale(kind, name):
    held = _Held(kind)
    held.scaler.scale(torch.ones(()))
    with held.sync.accumulate():
        held.sync.backward(CONSTANTS[name](held.loss(), held.scaler))
    held.sync.abandon()
    held.sync.close()


@pytest.mark.parametrize("kind", SCALERS)
def test_a_gradient_penalty_of_a_scaled_loss_is_no_scaled_loss(kind):
    """As in torch's examples of automatic mixed precision."""
    held = _Held(kind)
    with held.sync.accumulate():
        loss = held.weight.pow(3).sum()
        (grad,) = torch.autograd.grad(held.scaler.scale(loss), held.weight, create_graph=True)
        held.sync.backward(loss + (grad * (1.0 / held.scaler.get_scale())).norm())
    held.sync.abandon()
    held.sync.close()


@pytest.mark.parametrize("make", [pe.GradSync, pe.Checkpoints], ids=["GradSync", "Checkpoints"])
def test_one_of_several_processes_needs_a_process_group(monkeypatch, tmp_path, make):
    monkeypatch.setenv("WORLD_SIZE", "2")
    argument = nn.Linear(2, 1) if make is pe.GradSync else tmp_path
    with pytest.raises(RuntimeError, match=r"^call torch\.distributed\.init_process_group\(\) before"):
        make(argument)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_several_processes_of_mpirun_or_srun_is_warned(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    with pytest.warns(RuntimeWarning, match=f"^call torch.*WORLD_SIZE=1 if.*{name}=2 processes"):
        pe.GradSync(nn.Linear(2, 1)).close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("world_size", "num_tasks"), [("1", ""), ("", "1"), ("1", "2")])
def test_one_process_needs_none(monkeypatch, world_size, num_tasks):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", num_tasks)
    pe.GradSync(nn.Linear(2, 1)).close()
