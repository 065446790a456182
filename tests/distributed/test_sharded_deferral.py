"""When FSDP2 units communicate: as often as chosen, within the memory budget, with the same result."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from cases import assert_same, me, records_of
from ranks import on_ranks
from sharded_cases import (
    Chain,
    assert_trains_a_window,
    batch,
    loss_of,
    own_batches,
    right_grads,
    shard,
    sharded,
    train_a_window,
    whole_grads,
    windows_of,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import pyengine as pe
from pyengine.gradients.fsdp.private import groups_of

# Bytes of the chain's units, gathered in fp32: its own two parameters, the first layer and the second.
SUM_BYTES = 4 * (6 + (15 + 3 + 7) + (9 + 3))
HALF = {"first": "none", "": "none"}
ALL_OF_IT = {"defer_budget_mb": math.inf}
ANY = None


def _counted(model: nn.Module, name: str) -> list[mock.Mock]:
    """Count the calls of the collective `name` of every unit; return the mocks."""
    groups = [group for unit in model.modules() if isinstance(unit, FSDPModule) for group in groups_of(unit)]
    for group in groups:
        setattr(group, name, mock.Mock(wraps=getattr(group, name)))
    return [getattr(group, name) for group in groups]


@pytest.mark.parametrize(
    ("kind", "world", "narrow", "options", "gathers_once", "scatters", "held"),
    [
        ("flat", 3, True, {"defer": {"": "none"}}, ANY, ANY, ANY),
        ("nested", 2, True, {"defer": HALF}, ANY, ANY, ANY),
        ("replicate", 2, True, {"defer": "none"}, ANY, ANY, ANY),
        ("replicate", 2, True, ALL_OF_IT, ANY, ANY, ANY),
        ("hsdp", 4, True, {"defer": "none"}, ANY, ANY, ANY),
        ("hsdp", 4, True, {"defer_budget_mb": 100 / 2**20}, ANY, ANY, ANY),
        # Shards are scattered in every micro-batch, and summed over replicas once.
        ("hsdp", 4, True, {"defer": "outer"}, False, 9, 0),
        # Units in order: the root (24 bytes gathered and as a sum), the first layer (100), the second (48).
        ("nested", 2, False, {"defer_budget_mb": 0}, False, 9, 0),
        # Enough for the root alone: its parameters, which are gathered anyway, and its sum.
        ("nested", 2, False, {"defer_budget_mb": 48 / 2**20}, False, 9 - 2, 48),
        ("nested", 2, False, {"defer_budget_mb": SUM_BYTES / 2**20}, True, 9, SUM_BYTES),
        ("nested", 2, False, {"defer": "all"}, False, 3, SUM_BYTES),
        ("nested", 2, False, ALL_OF_IT, True, 3, 2 * SUM_BYTES),
    ],
    ids=str,
)
@on_ranks()
def test_every_choice_has_the_same_result_and_buys_what_it_can(
    kind, world, narrow, options, gathers_once, scatters, held
):
    """The windows follow one that was abandoned."""
    model = shard(Chain(), kind, narrow=narrow)
    gathered, scattered = (_counted(model, name) for name in ("_all_gather_comm", "_reduce_scatter_comm"))
    sync = pe.attach(model, accumulate=3, **options)
    records = records_of(sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in sync.windows(own_batches(3)):
        sync.backward(loss_of(model, next(iter(window))), count=3)
        break
    sync.abandon()
    for number in windows_of(sync, model, own_batches(6)):
        sync.unscale_()
        mine = [batch(100 * r + 3 * number + k) for r in range(world) for k in range(3)]
        assert_same(whole_grads(model), right_grads(mine, 9 * world))
        sync.step(optimizer)
        model.zero_grad()
        if number == 0:  # a forward outside of windows does not affect the next window
            with torch.no_grad():
                loss_of(model, own_batches(1)[0])
            for calls in (*gathered, *scattered):
                calls.reset_mock()
    assert gathers_once in (ANY, sum(calls.call_count for calls in gathered) == 3)  # one per unit
    assert scatters in (ANY, sum(calls.call_count for calls in scattered))
    assert held in (ANY, records[-1].held_bytes)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("defer='some': expected one of", [{"defer": "some"}]),
        ("defer has 'third', which is not a unit of the model", [{"defer": {"third": "all"}}]),
        ("defer='outer' for unit ''", [{"defer": "outer"}]),
        ("the budget chooses the units to defer", [{"defer": "none", "defer_budget_mb": 1}]),
        ("defer_budget_mb=-1: expected a size", [{"defer_budget_mb": -1}]),
        ("ranks have different settings", [{"defer": "all"}, {"defer": "none"}]),
    ],
)
@on_ranks(2)
def test_what_cannot_be_deferred_so_is_refused(text, options):
    """Each rank has its own options if there are two; else both ranks have the same."""
    rank, _ = me()
    model = shard(Chain(), "nested")
    with pytest.raises((TypeError, ValueError)) as error:
        pe.attach(model, accumulate=3, **options[rank % len(options)])
    assert text in str(error.value)


@pytest.mark.parametrize("options", [{"defer": "none"}, {"defer": HALF}], ids=str)
@on_ranks(2)
def test_a_state_between_windows_goes_on_whatever_is_deferred(options):
    sync, model = sharded("nested", **options)
    train_a_window(sync, model)
    model.zero_grad()
    state = sync.state_dict()
    sync.close()
    sync, model = sharded("nested")
    sync.load_state_dict(state)
    assert sync.window == 1
    assert_trains_a_window(sync, model)


@pytest.mark.parametrize("options", [ALL_OF_IT, {"defer": "all"}, {"defer_budget_mb": 48 / 2**20}], ids=str)
@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@pytest.mark.parametrize("kind", ["nested", "hsdp"])
@on_ranks(4)
def test_an_abandoned_window_leaves_the_sharded_parameters_in_the_model(kind, accumulator, options):
    model = shard(Chain(), kind, narrow=True)
    options = {} if accumulator == "exact" else options
    sync = pe.attach(model, accumulate=3, accumulator=accumulator, **options)
    before = {name: param for name, param in model.named_parameters()}
    for window in sync.windows(own_batches(3)):
        sync.backward(loss_of(model, next(iter(window))), count=3)
        break
    sync.abandon()
    after = dict(model.named_parameters())
    assert all(after[name] is param for name, param in before.items())
    with torch.no_grad():  # the next forward shards them again
        loss_of(model, own_batches(1)[0])
    assert all(isinstance(p, DTensor) for name, p in model.named_parameters() if name.startswith("first"))
    assert_trains_a_window(sync, model)
