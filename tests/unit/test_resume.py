"""Of states that are loaded one behind the other the last one counts."""

from __future__ import annotations

import torch
from torch import nn

import pyengine as pe
from pyengine.data.rng import rng_states


def _engine() -> tuple[pe.GradSync, nn.Module]:
    model = nn.Linear(2, 1)
    return pe.GradSync(model, accumulate=2), model


def test_a_state_between_loops_takes_the_place_of_one_loaded_before_it():
    (saver, model), (other, _), (loader, loaded) = _engine(), _engine(), _engine()
    for _ in other.windows([]):
        pass
    between = other.state_dict()
    with saver.accumulate():
        torch.rand(1)
        saver.backward(model(torch.ones(1, 2)).sum())
    loader.load_state_dict(saver.state_dict())
    loader.abandon()
    loader.load_state_dict(between)
    torch.rand(5)
    want = rng_states()["torch"]
    with loader.accumulate():
        assert torch.equal(rng_states()["torch"], want)
        loader.backward(loaded(torch.ones(1, 2)).sum())
