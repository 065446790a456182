"""What PowerSGD keeps, in states: the same bits, other numbers of ranks, and what no engine has saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import engine, me
from power_cases import SHAPES, Told, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.engine.checkpoint.checksum import checksum


def _saved(kind: str) -> tuple[dict[str, Any], list[Any]]:
    sync, forward, model = _one_bucket(kind)
    train(sync, forward, model, [0, 1])
    state = sync.state_dict()
    return state, train(sync, forward, model, [2, 3])


def _one_bucket(kind: str) -> tuple[pe.Sync, nn.Module, Told]:
    model = Told(me()[0])
    if kind == "own":
        return *engine(kind, model, accumulate=1, wire=pe.wire.PowerSGD(2)), model
    ddp = DistributedDataParallel(model)
    return pe.attach(ddp, accumulate=1, wire=pe.wire.PowerSGD(2)), ddp, model


def _goes_on(kind: str, states: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    rank, world = me()
    sync, forward, model = _one_bucket(kind)
    sync.load_state_dict(states[rank] if len(states) == world else states)
    kept = sync.state_dict()[f"rank {rank} of {world}"][0]
    return kept, train(sync, forward, model, [2, 3])


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_a_state_goes_on_with_the_same_bits(ranks, kind):
    saved = ranks(2).run(_saved, kind)
    found = ranks(2).run(_goes_on, kind, [state for state, _ in saved])
    for (_, right), (_, got) in zip(saved, found, strict=True):
        for window, other in zip(right, got, strict=True):
            assert all(torch.equal(window[name], other[name]) for name in SHAPES)


def test_another_number_of_ranks_goes_on_with_the_same_directions_and_sum_of_residuals(ranks):
    states = [state for state, _ in ranks(3).run(_saved, "own")]
    kept = [state[f"rank {rank} of 3"][0] for rank, state in enumerate(states)]
    found = [part for part, _ in ranks(2).run(_goes_on, "own", states)]
    for name in SHAPES:
        right = sum(part["residuals"][name].double() for part in kept)
        got = sum(part["residuals"][name].double() for part in found)
        # A sum of at most two float32 numbers a rank.
        assert torch.allclose(got, right, rtol=0, atol=float(right.abs().max()) * 4 * 2.0**-24)
    for part in found:
        assert part["factors"].keys() == kept[0]["factors"].keys()
        assert all(torch.equal(part["factors"][name], kept[0]["factors"][name]) for name in part["factors"])


def _damaged(states: list[Any], damage: str) -> str:
    rank, world = me()
    sync, *_ = _one_bucket("own")
    (content, _) = states[rank][f"rank {rank} of {world}"]
    content = dict(content, factors=dict(content["factors"]))
    match damage:
        case "name":
            content["factors"]["other"] = content["factors"]["wide"]
        case "rows":
            content["factors"]["wide"] = content["factors"]["wide"][1:].clone()
        case "nan":
            content["factors"]["wide"] = content["factors"]["wide"] * torch.nan
    state = dict(states[rank])
    state[f"rank {rank} of {world}"] = (content, checksum(content))
    with pytest.raises(ValueError) as error:
        sync.load_state_dict(state)
    return str(error.value)


DAMAGES = {
    "name": "factors['other'], which is no parameter here",
    "rows": "factors['wide'] of torch.float32 [39, 2], need finite float32 of as many rows",
    "nan": "factors['wide'] of torch.float32 [40, 2], need finite float32",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_directions_that_no_engine_has_saved_are_refused(ranks, damage):
    states = [state for state, _ in ranks(2).run(_saved, "own")]
    for message in ranks(2).run(_damaged, states, damage):
        assert DAMAGES[damage] in message
