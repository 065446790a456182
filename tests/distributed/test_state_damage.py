"""A damaged state is refused on every rank; nothing changes, and an intact state still loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from damages import ANY_STATE, OUTSIDE
from ranks import on_ranks
from states import content, packed, unpacked
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.data.rng import rank_and_world_size

FEEDBACK = pe.wire.ErrorFeedback(pe.wire.Int8())


class _Model(nn.Module):
    """A model with parameters of odd sizes, and one that is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).float().square().sum()


def _make(kind: str) -> tuple[pe.Sync, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model: nn.Module = _Model()
    if kind == "attach":
        model = DistributedDataParallel(model, find_unused_parameters=True)
        sync: pe.Sync = pe.attach(model, accumulate=2, wire=FEEDBACK)
    else:
        sync = pe.GradSync(model, accumulate=2, wire=FEEDBACK, bucket_cap_mb=1e-4)
    sync.scaler = pe.GradScaler("cpu", init_scale=4.0)

    def loss(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * index + rank_and_world_size()[0])
        return model(torch.randn(4, 3, generator=generator))

    return sync, loss


def _train(sync: pe.Sync, loss: Callable[[int], Tensor], batches: range) -> None:
    """Train micro-batches; gradients are not cleared, so each window adds to those of the previous one."""
    for index in batches:
        with sync.accumulate():
            sync.backward(loss(index), count=4)
            if sync.is_sync_step:
                sync.unscale_()


_files: dict[tuple[str, int, int], bytes] = {}


def _saved(kind: str) -> dict[str, Any]:
    case = (kind, *rank_and_world_size())
    if case not in _files:
        sync, loss = _make(kind)
        _train(sync, loss, range(4))
        state = sync.state_dict()
        # A single rank has no residuals: add some, so that damaged ones can be tested.
        for name, numel in sync._engine.reducer.residuals.numels.items():
            content(state)["residuals"].setdefault(name, torch.zeros(numel))
        _files[case] = packed(state)
    return unpacked(_files[case])


def _everything(sync: pe.Sync) -> bytes:
    """Return all that loading could change: position, order, carry, scaler, residuals, generators."""
    grads = [None if p.grad is None else p.grad.clone() for p in sync._engine.reducer.params]
    return packed([sync.state_dict(), grads, sync.window, sync.due])


def _message(sync: pe.Sync, state: Any) -> str:
    """Return the error of loading a damaged state; check that nothing has changed."""
    before = _everything(sync)
    with pytest.raises(ValueError) as caught:
        sync.load_state_dict(state)
    assert _everything(sync) == before
    return str(caught.value)


def _goes_on(kind: str, sync: pe.Sync, loss: Callable[[int], Tensor], state: dict[str, Any]) -> bool:
    """Load a state and train a window; return whether it ends like an uninterrupted run."""
    whole, its_loss = _make(kind)
    _train(whole, its_loss, range(6))
    sync.load_state_dict(state)
    _train(sync, loss, range(4, 6))
    ends = [
        [None if p.grad is None else p.grad.clone() for p in one._engine.reducer.params]
        for one in (sync, whole)
    ]
    return packed(ends[0]) == packed(ends[1])


@functools.cache
def _kept() -> pe.Sync:
    """Return one engine that all tests share, because refused states do not change it."""
    return _make("own")[0]


@pytest.mark.parametrize("name", ANY_STATE)
def test_what_no_engine_would_have_saved_is_refused(name):
    state = _saved("own")
    ANY_STATE[name](content(state))
    message = _message(_kept(), state)
    assert message.startswith(("state", "parameters differ")) and "cannot be read" not in message


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_around_the_part_of_a_rank_is_checked_too(name):
    state = _saved("own")
    OUTSIDE[name](state)
    message = _message(_kept(), state)
    assert message.startswith(("state", "start the engine without this state")) and message.isprintable()


@pytest.mark.parametrize("kind", ["own", "attach"])
@pytest.mark.parametrize("name", ["carry=None", "a residual of inf", "torch's generator is short"])
@on_ranks(2)
def test_what_one_rank_cannot_load_no_rank_loads(kind, name):
    state, spoilt = _saved(kind), _saved(kind)
    if rank_and_world_size()[0] == 1:
        ANY_STATE[name](content(spoilt))
    sync, loss = _make(kind)
    _train(sync, loss, range(1))
    sync.abandon()
    assert "rank 1: state" in _message(sync, spoilt)
    assert _goes_on(kind, sync, loss, state)


def test_a_state_is_not_written_to_by_the_run_that_goes_on_from_it():
    state = _saved("own")
    sync, loss = _make("own")
    sync.load_state_dict(state)
    _train(sync, loss, range(4, 6))
    for param in sync._engine.reducer.params:
        if param.grad is not None:
            param.grad.zero_()
    assert packed(state) == packed(_saved("own"))


def test_a_state_that_holds_itself_is_refused_and_not_followed_for_ever():
    state = _saved("own")
    own = content(state)
    own["carry"] = {"x": own}
    assert "carry=" in _message(_make("own")[0], state)
