"""A wrapped optimizer is an Optimizer: it works with schedulers, shares the state, and can be copied."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import pyengine as pe

ACCUMULATE = 2


def _made() -> tuple[torch.nn.Parameter, pe.Sync, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    return weight, pe.GradSync([weight], accumulate=ACCUMULATE), optimizer


def _micro_batch(sync: pe.Sync, weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with sync.accumulate():
        sync.backward(weight.sum())
        optimizer.step()


def _constant(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2)


# StepLR stands for all schedulers that only compute a rate from the number of steps.
SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "ConstantLR": _constant,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [_constant(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [_constant(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize(
    ("name", "over"),
    [*((name, "wrapped") for name in SCHEDULERS), ("StepLR", "bare"), ("OneCycleLR", "bare")],
)
def test_a_scheduler_steps_as_over_a_plain_loop_and_warns_of_nothing(name, over):
    weight, sync, bare = _made()
    wrapped = sync.wrap(bare)
    twin = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.5)
    metric = [1.0] if name == "ReduceLROnPlateau" else []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = SCHEDULERS[name](wrapped if over == "wrapped" else bare)
        theirs = SCHEDULERS[name](twin)
        for _ in range(4):
            for _ in range(ACCUMULATE):
                _micro_batch(sync, weight, wrapped)
            ours.step(*metric)
            twin.step()
            theirs.step(*metric)
            assert bare.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
            assert bare.param_groups[0]["momentum"] == twin.param_groups[0]["momentum"]
            assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_what_is_asked_of_it_is_the_wrapped_one_s():
    weight, sync, bare = _made()
    wrapped = sync.wrap(bare)
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert wrapped.param_groups is bare.param_groups and wrapped.state is bare.state
    assert wrapped.defaults is bare.defaults
    for _ in range(ACCUMULATE):
        _micro_batch(sync, weight, wrapped)
    saved = wrapped.state_dict()
    assert torch.equal(saved["state"][0]["momentum_buffer"], torch.ones(2))
    bare.param_groups[0]["lr"] = 7.0
    wrapped.load_state_dict(saved)
    assert bare.param_groups[0]["lr"] == 1.0
    called = []
    wrapped.register_step_post_hook(lambda *_: called.append(1))
    wrapped.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 3.0})
    for _ in range(2 * ACCUMULATE):
        _micro_batch(sync, weight, wrapped)
    assert called == [1, 1] and bare.param_groups[1]["lr"] == 3.0
    assert "SGD" in repr(wrapped)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_has_a_copy_of_the_optimizer_and_steps_nothing(how):
    weight, sync, bare = _made()
    wrapped = sync.wrap(bare)
    lr_scheduler.ExponentialLR(wrapped, 0.5)  # which patches step
    for _ in range(ACCUMULATE):
        _micro_batch(sync, weight, wrapped)
    twin = copy.deepcopy(wrapped) if how == "deepcopy" else pickle.loads(pickle.dumps(wrapped))
    assert type(twin.optimizer) is torch.optim.SGD and twin.optimizer is not bare
    assert torch.equal(twin.state_dict()["state"][0]["momentum_buffer"], torch.ones(2))
    with pytest.raises(RuntimeError, match="belongs to no engine"):
        twin.step()
    own = twin.param_groups[0]["params"][0]
    again = pe.GradSync([own], accumulate=ACCUMULATE)
    stepping = again.wrap(twin.optimizer)
    for _ in range(ACCUMULATE):
        _micro_batch(again, own, stepping)
    assert torch.equal(own, torch.full((2,), -1 - 1.5))


def test_a_scheduler_whose_step_needs_a_metric_is_refused_before_anything_is_stepped():
    weight, sync, bare = _made()
    plateau = lr_scheduler.ReduceLROnPlateau(bare)
    with pytest.raises(TypeError, match="takes a metric"):
        sync.wrap(bare, plateau)
    for window in sync.windows([1, 2]):
        for _ in window:
            sync.backward(weight.sum())
        with pytest.raises(TypeError, match="takes a metric"):
            sync.step(bare, plateau)
        assert torch.equal(weight, torch.zeros(2))
        sync.step(bare)


@pytest.mark.parametrize("given", ["wrapped", "name", "parameters"])
def test_what_is_no_plain_optimizer_is_refused_by_wrap_and_step(given):
    weight, sync, bare = _made()
    wrong = {"wrapped": sync.wrap(bare), "name": "SGD", "parameters": [weight]}[given]
    with pytest.raises(TypeError, match="optimizer"):
        sync.wrap(wrong)
    for window in sync.windows([1, 2]):
        for _ in window:
            sync.backward(weight.sum())
        with pytest.raises(
            TypeError, match=r"optimizer\.optimizer" if given == "wrapped" else "expected a torch"
        ):
            sync.step(wrong)
        sync.step(bare)
    assert torch.equal(weight, torch.full((2,), -1.0))


def test_a_closure_is_refused_since_the_gradients_are_there():
    weight, sync, bare = _made()
    wrapped = sync.wrap(bare)
    with sync.accumulate(last=True):
        sync.backward(weight.sum())
        with pytest.raises(ValueError, match="got a closure"):
            wrapped.step(lambda: None)
        wrapped.step()
    assert torch.equal(weight, torch.full((2,), -1.0))
