"""From a window's first backward to its step, only the engine may write to trained parameters."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, me
from ranks import on_ranks
from sharded_cases import Chain, shard, sharded, whole_grads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pyengine as pe

SAYS = "delete optimizer.step(), since sync.step already steps the optimizer: parameter '"


class Codebook(nn.Module):
    """A module whose forwards write to a trained parameter that gets no gradient, and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.add_(1)
            self.codes.data.add_(1)
            self.seen += 1
        return x + self.codes.detach()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Codebook(), nn.Linear(3, 1))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def _data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.data.add_(1)


def _clamp(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1).clamp_(-10, 10)


WRITES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "step": _step,
    "load": _load,
    "data": _data,
    "clamp": _clamp,
}


def _made(door: str, model: nn.Module, accumulate: int) -> tuple[pe.Sync, nn.Module]:
    if door == "attach":
        model = DistributedDataParallel(model)
        return pe.attach(model, accumulate=accumulate), model
    return pe.GradSync(model, accumulate=accumulate), model


@pytest.mark.parametrize("ends", ["step", "unscale_"])
@pytest.mark.parametrize("place", ["early", "last", "behind"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("door", ["GradSync", "attach"])
@on_ranks(2)
def test_a_write_inside_a_window_is_refused_on_every_rank(door, write, place, ends):
    """An early write happens on rank 1 only; both ranks raise an error."""
    model = _model()
    sync, forward = _made(door, model, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises((ValueError, RuntimeError)) as error:
        for window in sync.windows([torch.ones(1, 3)] * 2):
            for k, x in enumerate(window):
                sync.backward(forward(x).sum())
                if (place, k) in (("early", 0), ("last", 1)) and (place == "last" or me()[0] == 1):
                    WRITES[write](model, optimizer)
            if place == "behind":
                WRITES[write](model, optimizer)
            sync.unscale_() if ends == "unscale_" else sync.step(optimizer)
    assert SAYS in str(error.value)
    assert "call sync.abandon() and continue" not in str(error.value)


@on_ranks(2)
def test_a_write_to_shards_inside_a_window_is_refused():
    sync, forward = sharded("flat", accumulate=2)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="delete optimizer"):
        for window in sync.windows([torch.ones(2, 5)] * 4):
            for x in window:
                sync.backward(forward(x).sum())
                for param in forward.parameters():
                    param.grad = torch.zeros_like(param) if sync.is_sync_step else param.grad
                with torch.no_grad():
                    next(forward.parameters()).mul_(2.0)
            sync.step(optimizer)


def _ema_in_between(model: nn.Module) -> Callable[[], object]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return lambda: average.update_parameters(model)


def _evaluates(model: nn.Module) -> Callable[[], object]:
    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(torch.ones(1, 3))
            model.train()

    return evaluate


def _writes_frozen(model: nn.Module) -> Callable[[], object]:
    return lambda: model[0].bias.data.add_(1)


def _copies(model: nn.Module) -> Callable[[], object]:
    return lambda: (copy.deepcopy(model), model.state_dict(), [p.detach().sum() for p in model.parameters()])


@pytest.mark.parametrize("makes", [_ema_in_between, _evaluates, _writes_frozen, _copies])
@pytest.mark.parametrize("door", ["GradSync", "attach"])
@on_ranks(2)
def test_what_only_reads_or_writes_other_memory_is_no_error(door, makes):
    """The codebook's forwards write to a parameter without a gradient and to a buffer."""
    model = _model()
    model[0].bias.requires_grad_(False)
    sync, forward = _made(door, model, 2)
    optimizer, action = torch.optim.SGD(model.parameters(), lr=0.1), makes(model)
    for window in sync.windows([torch.ones(1, 3)] * 4):
        for x in window:
            sync.backward(forward(x).sum())
            action()
        sync.clip_grad_norm_(1.0)
        action()
        assert sync.step(optimizer)


@on_ranks(2)
def test_behind_the_step_everything_may_be_written():
    """For example clamping, normalizing weights, and swapping averaged weights in and out."""
    model = _model()
    sync = pe.GradSync(model, accumulate=2)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    for window in sync.windows([torch.ones(1, 3)] * 6):
        for x in window:
            sync.backward(model(x).sum())
        for optimizer in optimizers:
            assert sync.step(optimizer)
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-1, 1)
                param.div_(param.norm() + 1)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
        model.load_state_dict(kept)


@on_ranks(2)
def test_two_engines_step_between_each_others_micro_batches():
    nets = [nn.Linear(3, 1), nn.Linear(3, 1)]
    syncs = [pe.GradSync(net, accumulate=2) for net in nets]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    for k in range(8):
        for index in (0, 1) if k % 2 else (1, 0):
            with syncs[index].accumulate():
                syncs[index].backward(nets[index](torch.ones(1, 3)).sum())
            if syncs[index].is_sync_step:
                assert syncs[index].step(optimizers[index])


# ---- gradients that no engine owns ----


@pytest.mark.parametrize("ends", ["step", "unscale_"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
@pytest.mark.parametrize("door", ["GradSync", "attach"])
@on_ranks(2)
def test_a_gradient_that_nobody_reduces_is_refused_on_every_rank(door, how, accumulate, ends):
    model = _model()
    model[0].requires_grad_(False)
    sync, forward = _made(door, model, accumulate)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def window() -> None:
        for _ in range(accumulate):
            with sync.accumulate():
                sync.backward(forward(torch.ones(1, 3)).sum())
        sync.unscale_() if ends == "unscale_" else sync.step(optimizer)

    window()
    model.zero_grad()
    if how == "added":
        model[1].more = nn.Linear(3, 3)
        model[1].forward = lambda x: model[1].more(x)
    else:
        model[0].requires_grad_(True)
    name = "1.more.weight" if how == "added" else "0.weight"
    with pytest.raises((ValueError, RuntimeError), match=rf"make a new engine.*'{name}'"):
        window()


# ---- an engine that goes out of scope ----


@on_ranks(2)
def test_a_sharded_model_works_by_itself_behind_an_engine_that_was_collected():
    sync, forward = sharded("flat", accumulate=2)
    x = torch.full((2, 5), 1.0 + me()[0])
    with sync.accumulate():
        sync.backward(forward(x).sum())
    del sync
    gc.collect()
    forward.zero_grad()
    stock = shard(Chain(), "flat")
    for model in (forward, stock):
        model(x).sum().backward()
    assert_same(whole_grads(forward), whole_grads(stock))


# ---- settings ----


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("accumulate", 2, "set sync.gradient_accumulation_steps = 2"),
        ("accumulation_steps", 2, "set sync.gradient_accumulation_steps = 2"),
        ("windows", [], "call sync.windows"),
        ("no_sync", True, "call sync.no_sync"),
        ("step", 3, "call sync.step"),
        ("wire", "bf16", "pass wire='bf16' when you create the engine"),
        ("is_sync_step", True, "read sync.is_sync_step"),
    ],
)
def test_what_is_no_setting_is_refused_with_the_one_that_is(name, value, says):
    sync: Any = pe.GradSync(nn.Linear(2, 1), accumulate=1)
    with pytest.raises(AttributeError) as error:
        setattr(sync, name, value)
    assert str(error.value).startswith(says)
    sync.gradient_accumulation_steps = 3
    sync.scaler = pe.GradScaler("cpu")
    sync.note = "of the user's"
    assert sync.gradient_accumulation_steps == 3
