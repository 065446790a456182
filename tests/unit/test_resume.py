"""If several states are loaded, the last one counts; numbers that no engine writes are refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
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
    with saver.accumulate(last=True):
        torch.rand(1)
        saver.backward(model(torch.ones(1, 2)).sum())
    saver.unscale_()
    loader.load_state_dict(saver.state_dict())
    loader.load_state_dict(between)
    torch.rand(5)
    want = rng_states()["torch"]
    with loader.accumulate():
        assert torch.equal(rng_states()["torch"], want)
        loader.backward(loaded(torch.ones(1, 2)).sum())


def _measured() -> tuple[pe.GradSync, nn.Module]:
    sync, model = _engine()
    sync.scaler = pe.GradScaler("cpu", init_scale=4.0)
    sync.measure(pe.SpikePolicy(factor=4, window=3))
    sync.measure(pe.NoiseScale())
    for index in range(4):
        with sync.accumulate():
            sync.backward(model(torch.full((1, 2), index + 1.0)).square().sum())
            if sync.is_sync_step:
                sync.unscale_()
    model.zero_grad()
    return sync, model


def _spoilt(state: dict[str, Any], field: str, index: int, number: float) -> dict[str, Any]:
    content = copy.deepcopy(state["rank 0 of 1"][0])
    content["measured"][field][index] = number
    return {**state, "rank 0 of 1": (content,)}


@pytest.mark.parametrize("number", [math.nan, -1.0, 0.5, 1e300])
@pytest.mark.parametrize("field", ["spike", "noise_scale"])
def test_a_number_of_windows_that_none_were_measured_in_is_refused(field, number):
    sync, _ = _measured()
    state = sync.state_dict()
    with pytest.raises(ValueError, match=rf"has measured\['{field}'\]"):
        sync.load_state_dict(_spoilt(state, field, 0, number))
    sync.load_state_dict(state)


def test_a_norm_that_is_none_is_refused():
    sync, _ = _measured()
    for number in (math.nan, -1.0):
        with pytest.raises(ValueError, match="not a number of windows with their norms"):
            sync.load_state_dict(_spoilt(sync.state_dict(), "spike", 2, number))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", value) for value in (2.0**-149, 1, 3.0, 3.4e38)),
        *(("growth_factor", value) for value in (1.0, 2, 1e9)),
        *(("backoff_factor", value) for value in (1e-3, 1.0)),
        *(("growth_interval", value) for value in (0, 1, 10**10, 2**63 - 1)),
        *(("_growth_tracker", value) for value in (0, 5000, 2**31 - 2)),
    ],
)
def test_a_number_that_the_setters_of_a_scaler_take_comes_back(name, value):
    scaler = pe.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), name: value})
    sync, _ = _engine()
    sync.scaler = scaler
    state = sync.state_dict()
    other, _ = _engine()
    other.scaler = pe.GradScaler("cpu")
    other.load_state_dict(state)
    assert other.scaler.state_dict()[name] == pytest.approx(value)


@pytest.mark.parametrize(("name", "value"), [("scale", 1e300), ("scale", 0), ("_growth_tracker", 2**31)])
def test_a_scaler_of_its_own_refuses_such_numbers_too(name, value):
    scaler = pe.GradScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=rf"load another state: this one has scaler\['{name}'\]="):
        scaler.load_state_dict({**before, name: value})
    assert scaler.state_dict() == before


def test_a_world_may_be_of_any_size():
    sync, _ = _engine()
    state = sync.state_dict()
    state[f"rank 0 of {10**15}"] = state.pop("rank 0 of 1")
    sync.load_state_dict(state)
