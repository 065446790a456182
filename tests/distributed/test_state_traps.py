"""Loading a state together with loaders, zero_grad, late outcomes and leftover gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cases import me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pyengine as pe


def _batch(index: int) -> Tensor:
    """Return a micro-batch whose gradient is index + 1 everywhere."""
    return torch.full((1, 3), index + 1.0)


def _make(*, accumulate: int, kind: str = "own", **options: Any) -> tuple[pe.Sync, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    if kind == "own":
        return pe.GradSync(model, accumulate=accumulate, **options), model
    model = DistributedDataParallel(model)
    return pe.attach(model, accumulate=accumulate, **options), model


def _gradients(sync: pe.Sync, model: nn.Module, batches: Iterable[int]) -> list[float]:
    """Train windows of the micro-batches with these indices; return the gradient of each window."""
    found = []
    for window in sync.windows(batches):
        for index in window:
            sync.backward(model(_batch(index)).sum())
        sync.unscale_()
        found.append(float(model.weight.grad[0, 0]))
        model.weight.grad = None
    return found


def _mean(*indices: int) -> float:
    return sum(index + 1.0 for index in indices) / len(indices)


# Loaders.


@on_ranks(1)
def test_generators_go_on_behind_what_a_data_loader_draws():
    data = [_batch(index)[0] for index in range(6)]

    def run(sync: pe.Sync, model: nn.Module, begin: int) -> tuple[list[float], dict[str, Any]]:
        """Return the random number of every micro-batch, and the state after the first window."""
        drawn, state = [], {}
        for window in sync.windows(DataLoader(data[begin:], batch_size=1)):
            for x in window:
                drawn.append(torch.rand(()).item())
                sync.backward(model(x).sum())
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
            state = state or sync.state_dict()
        return drawn, state

    whole, state = run(*_make(accumulate=2), 0)
    sync, model = _make(accumulate=2)
    sync.load_state_dict(state)
    resumed, _ = run(sync, model, 2)
    assert resumed == whole[2:]


# Leftovers.


def _leave_a_gradient(sync: pe.Sync, model: nn.Module, batches: list[int]) -> None:
    """Train a window whose gradient is neither used nor cleared."""
    for window in sync.windows(batches):
        for index in window:
            sync.backward(model(_batch(index)).sum())
        sync.unscale_()


@on_ranks(1)
def test_gradients_that_a_state_has_kept_are_the_callers_to_clear():
    sync, model = _make(accumulate=2)
    _leave_a_gradient(sync, model, [0, 1])
    state = sync.state_dict()
    sync, model = _make(accumulate=2)
    sync.load_state_dict(state)
    model.zero_grad()
    assert _gradients(sync, model, [0, 1]) == [_mean(0, 1)]


@on_ranks(1)
def test_gradients_of_before_do_not_leak_into_what_is_loaded():
    sync, model = _make(accumulate=2)
    state = sync.state_dict()
    _leave_a_gradient(sync, model, [8, 9])
    sync.load_state_dict(state)
    model.zero_grad()
    assert _gradients(sync, model, [0, 1]) == [_mean(0, 1)]


@on_ranks(2)
def test_a_late_outcome_is_read_before_loading():
    sync, model = _make(accumulate=1)
    sync._engine.is_late = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    state = sync.state_dict()
    records: list[int] = []
    sync.on_step(lambda record: records.append(record.step))
    for number in range(2):
        with sync.accumulate():
            sync.backward(model(_batch(number)).sum())
        sync.step(optimizer)
    sync.load_state_dict(state)
    before = len(records)
    with sync.accumulate():
        sync.backward(model(_batch(0)).sum())
    sync.step(optimizer)
    sync.synchronize()
    assert (before, len(records)) == (2, 3)
    assert sync.state_dict()["steps"] == 1


@pytest.mark.parametrize("at", [0, 1])
@on_ranks(2)
def test_a_state_that_is_loaded_inside_the_loop_ends_it_on_no_rank_alone(at):
    """Rank 1 has no data left when it loads the state from before window `at`."""
    rank, _ = me()
    sync, model = _make(accumulate=1)
    optimizer, states = torch.optim.SGD(model.parameters(), lr=0.1), [sync.state_dict()]
    for window in sync.windows(range(4 - 2 * rank)):
        for index in window:
            sync.backward(model(_batch(index)).sum())
        sync.step(optimizer)
        states.append(sync.state_dict())
        if len(states) == 3:
            sync.load_state_dict(states[at])
    assert len(states) == 5


@pytest.mark.parametrize("names", [("w", "w", "w"), ("w", "w", "w#2"), ("w#2", "w", "w")])
@on_ranks(1)
def test_parameters_of_one_name_are_different_parameters(names):
    params = [nn.Parameter(torch.ones(3)) for _ in names]
    named = list(zip(names, params, strict=True))

    def run(sync: pe.Sync) -> None:
        with sync.accumulate():
            sync.backward(sum(10**place * param.sum() for place, param in enumerate(params)))
        sync.unscale_()

    sync = pe.GradSync(named, accumulate=1)
    run(sync)
    state = sync.state_dict()
    sync.close()
    for param in params:
        param.grad = None
    sync = pe.GradSync(named, accumulate=1)
    sync.load_state_dict(state)
    assert [float(param.grad[0]) for param in params] == [1.0, 10.0, 100.0]
