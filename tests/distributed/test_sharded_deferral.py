"""When units of FSDP2 communicate: as often as was chosen, within the memory given, to one result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import assert_same, me, records_of
from marks import rest
from ranks import on_ranks
from sharded_cases import (
    Chain,
    all_batches,
    assert_trains_a_window,
    loss_of,
    own_batches,
    right_grads,
    shard,
    sharded,
    whole_grads,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule

import pyengine as pe
from pyengine.gradients.fsdp.private import groups_of

# What the chain's units have: gathered in fp32, its own two parameters, the first layer and the second.
SUM_BYTES = 4 * (6 + (15 + 3 + 7) + (9 + 3))
HALF = {"first": "none", "": "none"}
ALL_OF_IT = {"defer_budget_mb": math.inf}


class Calls:
    """Counts what units launch, and how much memory they hold in the meantime."""

    def __init__(self, model: nn.Module) -> None:
        self.gathers = self.scatters = 0
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                for group in groups_of(unit):
                    group._all_gather_comm = _Counted(group._all_gather_comm, self, "gathers")
                    group._reduce_scatter_comm = _Counted(group._reduce_scatter_comm, self, "scatters")


class _Counted:
    def __init__(self, inner: Any, calls: Calls, name: str) -> None:
        self._inner, self._calls, self._name = inner, calls, name
        self.allocate = inner.allocate

    def __call__(self, *args: Any, **options: Any) -> Any:
        setattr(self._calls, self._name, getattr(self._calls, self._name) + 1)
        return self._inner(*args, **options)


def _window(kind: str, options: dict[str, Any], *, narrow: bool) -> tuple[int, int, int]:
    """Train behind a window that was abandoned; return gathers, scatters and bytes held."""
    _, world = me()
    model = shard(Chain(), kind, narrow=narrow)
    calls = Calls(model)
    sync = pe.attach(model, accumulate=3, **options)
    records = records_of(sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in sync.windows(own_batches(3)):
        sync.backward(loss_of(model, next(iter(window))), count=3)
        break
    sync.abandon()
    for number, window in enumerate(sync.windows(own_batches(6))):
        before = calls.gathers, calls.scatters
        for data in window:
            sync.backward(loss_of(model, data), count=3)
        after = calls.gathers, calls.scatters
        sync.unscale_()
        batches = all_batches([3 * number + 3] * world)
        size = 3 * number + 3
        mine = [data for r in range(world) for data in batches[r * size + 3 * number : (r + 1) * size]]
        assert_same(whole_grads(model), right_grads(mine, 9 * world))
        sync.step(optimizer)
        for param in model.parameters():
            param.grad = None
        if number == 0:  # a forward outside of windows leaves nothing that the next one would take for new
            with torch.no_grad():
                loss_of(model, own_batches(1)[0])
    gathers, scatters = (b - a for a, b in zip(before, after, strict=True))
    return gathers, scatters, records[-1].held_bytes


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("flat", 3, {"defer": {"": "none"}}),
        ("nested", 2, {"defer": HALF}),
        ("replicate", 2, {"defer": "none"}),
        ("replicate", 2, ALL_OF_IT),
        ("hsdp", 4, {"defer": "none"}),
        ("hsdp", 4, {"defer_budget_mb": 100 / 2**20}),
    ],
    ids=str,
)
def test_every_choice_has_the_same_result(ranks, kind, world, options):
    ranks(world).run(_window, kind, options, narrow=True)


def test_shards_are_scattered_in_every_micro_batch_and_summed_over_replicas_once(ranks):
    for gathers, scatters, held in ranks(4).run(_window, "hsdp", {"defer": "outer"}, narrow=True):
        assert (scatters, held) == (9, 0) and gathers > 3


@pytest.mark.parametrize(
    ("options", "gathers_once", "want"),
    [
        # Units in order: the root (24 bytes gathered and as a sum), the first layer (100), the second (48).
        ({"defer_budget_mb": 0}, False, (9, 0)),
        ({"defer_budget_mb": 48 / 2**20}, False, (9 - 2, 48)),  # the root: gathered anyway, and its sum
        ({"defer_budget_mb": SUM_BYTES / 2**20}, True, (9, SUM_BYTES)),
        ({"defer": "all"}, False, (3, SUM_BYTES)),
        (ALL_OF_IT, True, (3, 2 * SUM_BYTES)),
    ],
    ids=str,
)
def test_a_budget_buys_what_it_can(ranks, options, gathers_once, want):
    for gathers, scatters, held in ranks(2).run(_window, "nested", options, narrow=False):
        assert (scatters, held) == want
        assert (gathers == 3) == gathers_once  # one a unit


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("defer='some': need one of", [{"defer": "some"}]),
        ("defer has 'third', which is no unit of the model", [{"defer": {"third": "all"}}]),
        ("defer='outer' for unit ''", [{"defer": "outer"}]),
        ("the budget chooses the units to defer", [{"defer": "none", "defer_budget_mb": 1}]),
        ("defer_budget_mb=-1: need a size", [{"defer_budget_mb": -1}]),
        ("ranks have different settings", [{"defer": "all"}, {"defer": "none"}]),
    ],
)
@on_ranks(2)
def test_what_cannot_be_deferred_so_is_refused(text, options):
    """Ranks choose their options, or all of them the only ones."""
    rank, _ = me()
    model = shard(Chain(), "nested")
    with pytest.raises((TypeError, ValueError)) as error:
        pe.attach(model, accumulate=3, **options[rank % len(options)])
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("kind", "world", "options", "name"),
    [
        *rest(("flat", 2, {"defer": "none"}, "unit '' has defer='none'")),
        ("nested", 2, {"defer": HALF}, "unit '' has defer='none'"),
        ("hsdp", 4, {"defer": "outer"}, "unit '' has defer='outer'"),
    ],
    ids=str,
)
@on_ranks()
def test_a_state_of_sums_that_were_reduced_in_part_is_refused_by_name(kind, options, name):
    """Refused are saving in an open window, and loading one that defers everything."""
    sync, model = sharded(kind)
    sync.set_requires_gradient_sync(False)
    sync.backward(loss_of(model, own_batches(1)[0]), count=3)
    whole = sync.state_dict()
    sync.close()
    sync, model = sharded(kind, **options)
    for window in sync.windows(own_batches(3)):
        for number, data in enumerate(window):
            sync.backward(loss_of(model, data), count=3)
            if number == 0:
                with pytest.raises(RuntimeError) as on_save:
                    sync.state_dict()
        sync.unscale_()
        for param in model.parameters():
            param.grad = None
    with pytest.raises(ValueError) as on_load:
        sync.load_state_dict(whole)
    sync.load_state_dict(sync.state_dict())
    assert sync.window == 1
    assert_trains_a_window(sync, model)
    on_save, on_load = [str(on_save.value), str(on_load.value)]
    assert on_save.startswith(f"state_dict: {name}, so the sums of an open window are in FSDP's reduced")
    assert name in on_load
    assert all("attach with defer='all'" in message for message in (on_save, on_load))
