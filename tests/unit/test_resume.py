"""A loaded state that was not continued is returned unchanged by `state_dict`."""

from __future__ import annotations

import torch
from torch import nn

import pyengine as pe
from pyengine.data.rng import rng_states


def _engine() -> tuple[pe.GradSync, nn.Module]:
    model = nn.Linear(2, 1)
    return pe.GradSync(model, accumulate=2), model


def test_the_generators_of_a_state_that_no_loop_goes_on_with_yet_are_saved_again():
    (saver, model), (loader, _) = _engine(), _engine()
    with saver.accumulate():
        saver.backward(model(torch.ones(1, 2)).sum())
    saved = saver.state_dict()
    torch.rand(3)  # the process goes on
    loader.load_state_dict(saved)
    again = loader.state_dict()
    assert torch.equal(again["rank 0 of 1"][0]["rng"]["torch"], saved["rank 0 of 1"][0]["rng"]["torch"])


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
