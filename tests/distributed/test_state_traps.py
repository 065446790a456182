"""Loading a state beside other loaders, zero_grad, exceptions, leftovers and wrong lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cases import me
from ranks import on_ranks
from states import changed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pyengine as pe


def _batch(index: int) -> Tensor:
    """A micro-batch whose gradient is index + 1 everywhere."""
    return torch.full((1, 3), index + 1.0)


def _make(*, accumulate: int, kind: str = "own", **options: Any) -> tuple[pe.Sync, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    if kind == "own":
        return pe.GradSync(model, accumulate=accumulate, **options), model
    model = DistributedDataParallel(model)
    return pe.attach(model, accumulate=accumulate, **options), model


def _run(sync: pe.Sync, model: nn.Module, batches: Iterable[int], *, stop: int = -1) -> list[dict[str, Any]]:
    """Run windows over micro-batches by their index; return states after each, or stop after some."""
    states = []
    for window in sync.windows(batches):
        for index in window:
            sync.backward(model(_batch(int(torch.as_tensor(index).sum()))).sum())
            if not sync.is_sync_step:
                states.append(sync.state_dict())
            if len(states) == stop:
                return states
        sync.unscale_()
        for param in model.parameters():
            states.append({"grad": param.grad.clone()})
            param.grad = None
    return states


def _gradient(states: list[dict[str, Any]]) -> float:
    return float(states[-1]["grad"].flatten()[0])


def _gathered(value: Any) -> list[Any]:
    everybody: list[Any] = [None] * me()[1]
    torch.distributed.all_gather_object(everybody, value)
    return everybody


def _mean(*indices: int) -> float:
    return sum(index + 1.0 for index in indices) / len(indices)


# Loaders.


def _sampler_of(num: int) -> tuple[pe.WindowSampler, pe.Exact]:
    sampler = pe.WindowSampler(num, seed=0, micro_batch=1, global_batch=4 if num == 9 else 3, shuffle=False)
    return sampler, pe.Exact(micro_batches=sampler.micro_batches)


def _state_of_one_rank(num: int, window: int, places: int) -> dict[str, Any]:
    """Return a state after so many micro-batches of a window."""
    sampler, exact = _sampler_of(num)
    begin = window * sampler.micro_batches
    made = _make(accumulate=sampler.accumulate, accumulator=exact)
    return changed(_run(*made, range(begin, begin + 8), stop=places)[-1], window=window)


def _goes_on(num: int, window: int, state: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return what this rank has computed, and the gradients of all windows."""
    sampler, exact = _sampler_of(num)
    sync, model = _make(accumulate=sampler.accumulate, accumulator=exact)
    sync.load_state_dict([state])
    sampler.set_epoch(0, window=window, due=sync.due)
    computed, gradients = [], []
    for micro_batches in sync.windows(sampler):
        for (index,) in micro_batches:
            computed.append(index)
            sync.backward(model(_batch(index)).sum())
        sync.unscale_()
        gradients.append(float(model.weight.grad[0, 0]))
        model.weight.grad = None
    return computed, gradients


@pytest.mark.parametrize(
    ("world", "window", "places", "num", "left", "windows"),
    [(2, 1, 3, 9, [7, 8], [[4, 5, 6, 7], [8]]), (4, 0, 1, 3, [1, 2], [[0, 1, 2]])],
    ids=["nothing due and a window to come", "no ordinary share and a part of the rest"],
)
def test_a_rank_may_have_no_share_of_what_is_left(ranks, world, window, places, num, left, windows):
    (state,) = ranks(1).run(_state_of_one_rank, num, window, places)
    results = ranks(world).run(_goes_on, num, window, state)
    assert sorted(index for computed, _ in results for index in computed) == left
    assert [gradients for _, gradients in results] == [[_mean(*each) for each in windows]] * world


# What stands between loading and the first backward.


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_zero_grad_before_the_first_backward_is_harmless(kind, accumulator):
    sync, model = _make(accumulate=3, kind=kind, accumulator=accumulator)
    (state,) = _run(sync, model, range(3), stop=1)
    sync, model = _make(accumulate=3, kind=kind, accumulator=accumulator)
    sync.load_state_dict(state)
    gradient = 0.0
    for window in sync.windows([1, 2]):
        model.zero_grad()
        for index in window:
            sync.backward(model(_batch(index)).sum())
        sync.unscale_()
        gradient = float(next(model.parameters()).grad[0, 0])
    assert gradient == 2.0


@on_ranks(1)
def test_generators_go_on_behind_what_a_data_loader_draws():
    data = [_batch(index)[0] for index in range(6)]

    def run(sync: pe.Sync, model: nn.Module, begin: int) -> tuple[list[float], dict[str, Any]]:
        """Return what every micro-batch draws, and the state behind the third of all."""
        drawn, state = [], {}
        for window in sync.windows(DataLoader(data[begin:], batch_size=1)):
            for x in window:
                drawn.append(torch.rand(()).item())
                sync.backward(model(x).sum())
                if begin + len(drawn) == 3:
                    state = sync.state_dict()
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        return drawn, state

    whole, state = run(*_make(accumulate=2), 0)
    sync, model = _make(accumulate=2)
    sync.load_state_dict(state)
    resumed, _ = run(sync, model, 3)
    assert resumed == whole[3:]


# Leftovers.


def _leave_a_gradient(sync: pe.Sync, model: nn.Module, batches: list[int]) -> None:
    """Train a window whose gradient nobody uses or clears."""
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
    assert _gradient(_run(sync, model, [0, 1])) == _mean(0, 1)


@pytest.mark.parametrize("case", ["handed over", "carried"])
@on_ranks(1)
def test_gradients_of_before_do_not_leak_into_what_is_loaded(case):
    sync, model = _make(accumulate=2)
    (state,) = _run(sync, model, [0, 1], stop=1)
    sync, model = _make(accumulate=2)
    if case == "handed over":
        _leave_a_gradient(sync, model, [8, 9])
    else:
        sync.load_state_dict(changed(state, carry={"weight": torch.full((1, 3), 7.0)}))
        sync.abandon()
    sync.load_state_dict(state)
    assert _gradient(_run(sync, model, [1])) == _mean(0, 1)


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
    """Rank 1 has no data left when it loads a state of before window `at`."""
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


@pytest.mark.parametrize("how", ["abandon", "flush", "an empty loader"])
@on_ranks(2)
def test_a_loaded_window_can_be_dropped_or_sent_at_once(how):
    sync, model = _make(accumulate=3)
    state = _run(sync, model, range(3), stop=2)[-1]
    sync, model = _make(accumulate=3)
    sync.load_state_dict(state)
    if how == "abandon":
        sync.abandon()
    elif how == "flush":
        sync.flush()
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    else:
        assert _gradient(_run(sync, model, [])) == _mean(0, 1)
    assert _gradient(_run(sync, model, [4, 5, 6])) == _mean(4, 5, 6)


# States that do not go together.


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("accumulate", "state of accumulate=3, and this engine has accumulate=1"),
        ("scaler", "states have no loss scale and this engine one"),
    ],
)
@on_ranks(2)
def test_states_that_cannot_go_on_here_are_refused_on_every_rank(case, message):
    sync, model = _make(accumulate=3)
    (state,) = _run(sync, model, range(3), stop=1)
    sync, model = _make(accumulate=1 if case == "accumulate" else 3)
    if case == "scaler":
        sync.scaler = pe.GradScaler("cpu")
    with pytest.raises(ValueError) as error:
        sync.load_state_dict(state)
    assert message in str(error.value)


@pytest.mark.parametrize("names", [("w", "w", "w"), ("w", "w", "w#2"), ("w#2", "w", "w")])
@on_ranks(1)
def test_parameters_of_one_name_are_different_parameters(names):
    params = [nn.Parameter(torch.ones(3)) for _ in names]
    named = list(zip(names, params, strict=True))

    def run(sync: pe.Sync) -> None:
        with sync.accumulate():
            sync.backward(sum(10**place * param.sum() for place, param in enumerate(params)))

    sync = pe.GradSync(named, accumulate=2)
    run(sync)
    state = sync.state_dict()
    sync.close()
    sync = pe.GradSync(named, accumulate=2)
    sync.load_state_dict(state)
    run(sync)
    sync.unscale_()
    assert [float(param.grad[0]) for param in params] == [1.0, 10.0, 100.0]


def _resumed(accumulate: int) -> tuple[pe.Sync, dict[str, Any]]:
    """Return an engine of sums with room for 8 micro-batches, and a state after this rank's first one."""
    options = {"accumulate": accumulate, "accumulator": pe.Exact(micro_batches=8)}
    (state,) = _run(*_make(**options), range(accumulate), stop=1)
    return _make(**options)[0], state


@pytest.mark.parametrize("listed", [False, True])
def test_what_is_left_is_what_the_ranks_were_made_for(listed):
    sync, state = _resumed(3)
    sync.load_state_dict([state] if listed else state)
    assert sync.due == [1, 2]


@on_ranks(2)
def test_what_another_rank_s_own_state_holds_is_not_due_here():
    rank, _ = me()
    sync, state = _resumed(4)
    sync.load_state_dict(changed(state, places=[1 + rank]))
    assert sync.due == [[0, 3], [4, 5, 6, 7]][rank]


@on_ranks(2)
def test_a_rank_finds_its_own_part_among_those_of_all():
    """A checkpoint of all ranks holds the parts of every rank in one dict."""
    rank, _ = me()
    sync, model = _make(accumulate=2)
    (state,) = _run(sync, model, [2 * rank, 2 * rank + 1], stop=1)
    both = _gathered(state)
    sync, model = _make(accumulate=2)
    sync.load_state_dict({**both[0], **both[1]})
    assert _gradient(_run(sync, model, [2 * rank + 1])) == _mean(0, 1, 2, 3)
