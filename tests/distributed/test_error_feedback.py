"""Residuals over many windows, across rebuilt buckets, in states, and on other numbers of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import engine, me, step_while_the_scale_grows
from marks import rest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from wire_cases import FEEDBACK

import pyengine as pe
from pyengine.checkpoint.checksum import checksum

WIRE = FEEDBACK["int8"]
SIZES = (40, 3, 77)
STEP = 0.50004 / 127  # what Int8 may lose of the largest value of a block


class _Fixed(nn.Module):
    """Its gradient is what it is told: `scale` times numbers of this rank's own, by parameter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])
        self.targets = [
            torch.randn(size, generator=torch.Generator().manual_seed(10 * rank + index))
            for index, size in enumerate(SIZES)
        ]

    def forward(self, scale: float) -> Tensor:
        # Backwards, so that gradients come in the order of registration: that of DDP's first buckets.
        pairs = [*zip(self.params, self.targets, strict=True)][::-1]
        return sum((param * target).sum() for param, target in pairs) * scale

    def flat(self) -> Tensor:
        return torch.cat([param.grad for param in self.params]).double()


def _targets(world: int) -> list[Tensor]:
    return [torch.cat(_Fixed(rank).targets).double() for rank in range(world)]


def _lost(terms: Sequence[Tensor]) -> float:
    """Bound what all ranks together still keep, by element.

    A rank keeps at most STEP of its largest value v, which is its term and what it kept before: v <= term +
    kept. The owner of a part has lost STEP of the sum of all values as well. So with T the sum of the ranks'
    largest terms, K <= 2 STEP (T + K), or K <= 2 STEP T / (1 - 2 STEP).
    """
    total = float(sum(term.abs().max() for term in terms))
    return 2 * STEP * total / (1 - 2 * STEP)


def _means(kind: str, counts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Train over many windows; return how far the sum of all gradients is from the true one, and what may
    be.

    Args:
        counts: by window and rank, of its one micro-batch.
    """
    rank, world = me()
    model = _Fixed(rank)
    sync, forward = engine(kind, model, accumulate=1, wire=WIRE)
    targets, most = _targets(world), 0.0
    arrived = torch.zeros(sum(SIZES), dtype=torch.float64)
    right = arrived.clone()
    for number, window in enumerate(sync.windows(range(len(counts)))):
        mine = counts[number]
        for _ in window:
            sync.backward(forward(float(mine[rank])), count=mine[rank])
        sync.unscale_()
        arrived += model.flat()
        terms = [target * mine[r] / sum(mine[:world]) for r, target in enumerate(targets)]
        right += sum(terms)
        most = max(most, _lost(terms))
        for param in model.params:
            param.grad = None
    assert len(counts) > 0
    return float((arrived - right).abs().max()), most


EQUAL = [[2, 2, 2, 2]] * 40
UNEQUAL = [[1 + (number * (rank + 2)) % 7 for rank in range(4)] for number in range(40)]


@pytest.mark.parametrize("counts", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize(("kind", "world"), [("own", 2), ("attach", 3), *rest(("own-native", 4), ("own", 1))])
def test_what_has_arrived_over_many_windows_lacks_what_one_window_loses(ranks, kind, world, counts):
    for far, most in ranks(world).run(_means, kind, counts):
        # float32 adds 1/count, the residual and W values, some roundings of a mean below 8 in each window.
        assert far <= most + 40 * 8 * 8 * 2.0**-24


class _Partly(_Fixed):
    """It uses its last parameter only as long as it `uses_all`."""

    uses_all = True

    def forward(self, scale: float) -> Tensor:
        return super().forward(scale) if self.uses_all else (self.params[0] * self.targets[0]).sum() * scale


def _norms_beside_an_unused_parameter(kind: str) -> list[tuple[float, float]]:
    model = _Partly(me()[0])
    sync, forward = engine(kind, model, accumulate=1, wire=WIRE)
    found = []
    for window in sync.windows(range(3)):
        for _ in window:
            sync.backward(forward(1.0))
        sync.unscale_()
        norm = float(sync.clip_grad_norm_(float("inf")))
        grads = [param.grad.double() for param in model.params if param.grad is not None]
        found.append((norm, float(torch.cat(grads).norm())))
        assert len(grads) == (3 if model.uses_all else 1)
        model.uses_all = False
        for param in model.params:
            param.grad = None
    return found


@pytest.mark.parametrize("world", [2, *rest(1, 3, 4)])
@pytest.mark.parametrize("kind", ["own", "attach"])
def test_what_a_parameter_that_nobody_used_has_left_on_the_wire_is_not_in_the_norm(ranks, kind, world):
    for found in ranks(world).run(_norms_beside_an_unused_parameter, kind):
        for norm, of_grads in found:
            # A norm is told in float32; what the residuals of 80 of 120 elements add is 7e-5 of it.
            assert norm == pytest.approx(of_grads, rel=1e-6)


def _hook_means() -> tuple[float, float]:
    rank, world = me()
    model = _Fixed(rank)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    ddp.register_comm_hook(pe.HookState(wire=WIRE), pe.comm_hook)
    arrived = torch.zeros(sum(SIZES), dtype=torch.float64)
    for _ in range(40):
        ddp.zero_grad()
        ddp(1.0).backward()
        arrived += model.flat()
    terms = [target / world for target in _targets(world)]
    return float((arrived - 40 * sum(terms)).abs().max()), _lost(terms)


def test_the_bare_hook_keeps_residuals_when_ddp_lays_its_buckets_out_anew(ranks):
    for far, most in ranks(2).run(_hook_means):
        assert far <= most + 40 * 8 * 8 * 2.0**-24


def _train(sync: pe.Sync, forward: nn.Module, model: _Fixed, windows: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for window in sync.windows([1.0] * windows):
        for scale in window:
            sync.backward(forward(scale))
        sync.step(optimizer)
        found.append(model.flat())
    return found


def _one_bucket(kind: str, wire: pe.wire.Wire) -> tuple[_Fixed, pe.Sync, nn.Module]:
    """Make an engine whose blocks are the same in every window: several buckets of DDP's would be others in
    its first one.
    """
    model = _Fixed(me()[0])
    if kind == "own":
        return model, *engine(kind, model, accumulate=1, wire=wire)
    ddp = DistributedDataParallel(model)
    return model, pe.attach(ddp, accumulate=1, wire=wire), ddp


def _saved(kind: str, wire: pe.wire.Wire) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a state after three windows, and the gradients of three more."""
    model, sync, forward = _one_bucket(kind, wire)
    _train(sync, forward, model, 3)
    state = sync.state_dict()
    return state, _train(sync, forward, model, 3)


def _goes_on(kind: str, wire: pe.wire.Wire, states: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Any]:
    rank, world = me()
    model, sync, forward = _one_bucket(kind, wire)
    sync.load_state_dict(states[rank] if len(states) == world else states)
    again = sync.state_dict()[f"rank {rank} of {world}"][0].get("residuals", {})
    return again, _train(sync, forward, model, 3)


@pytest.mark.parametrize("wire", [WIRE, pe.wire.ErrorFeedback(pe.wire.Int8(block=32, rounding="stochastic"))])
@pytest.mark.parametrize("kind", ["own", "attach"])
def test_a_state_goes_on_with_the_same_bits(ranks, kind, wire):
    saved = ranks(2).run(_saved, kind, wire)
    found = ranks(2).run(_goes_on, kind, wire, [state for state, _ in saved])
    for (_, right), (_, got) in zip(saved, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(right, got, strict=True))


def _sum_of(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for part in parts for name in part}
    return {name: sum(part[name].double() for part in parts if name in part) for name in names}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), *rest((4, 1), (1, 3))])
@pytest.mark.parametrize(("saves", "loads"), [("own", "own"), *rest(("attach", "own"), ("own", "attach"))])
def test_another_number_of_ranks_keeps_the_same_sum(ranks, saves, loads, before, after):
    states = [state for state, _ in ranks(before).run(_saved, saves, WIRE)]
    kept = [state[f"rank {rank} of {before}"][0].get("residuals", {}) for rank, state in enumerate(states)]
    kept = [{name.removeprefix("module."): part for name, part in parts.items()} for parts in kept]
    found = _sum_of([parts for parts, _ in ranks(after).run(_goes_on, loads, WIRE, states)])
    assert (found.keys() == _sum_of(kept).keys()) and (len(found) == len(SIZES)) == (before > 1)
    for name, part in _sum_of(kept).items():
        # A sum of at most two float32 numbers a rank.
        assert torch.allclose(found[name], part, rtol=0, atol=float(part.abs().max()) * 4 * 2.0**-24)


def _loads(states: list[dict[str, Any]], wire: pe.wire.Wire) -> str:
    rank, _ = me()
    sync = pe.GradSync(_Fixed(rank), accumulate=1, wire=wire)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sync.load_state_dict(states)
        except ValueError as error:
            return str(error)
    return "; ".join(str(warning.message) for warning in caught)


def test_a_state_that_cannot_be_shared_out_and_a_wire_that_keeps_nothing_are_named(ranks):
    states = [state for state, _ in ranks(3).run(_saved, "own", WIRE)]
    assert "need those of all ranks of one save" in ranks(2).run(_loads, states[:2], WIRE)[1]
    assert "the state has residuals" in ranks(2).run(_loads, states, pe.wire.Int8())[0]
    assert ranks(2).run(_loads, states, WIRE) == ["", ""]


def test_a_state_of_a_wire_that_is_gone_loads_its_residuals(ranks):
    """0.1.0's PowerSGD kept tensors by parameter besides residuals, in a field of their own."""
    states = [state for state, _ in ranks(2).run(_saved, "own", WIRE)]
    for rank, state in enumerate(states):
        content = state[f"rank {rank} of 2"][0] | {"factors": {"wide": torch.ones(3, 1)}}
        state[f"rank {rank} of 2"] = (content, checksum(content))
    assert ranks(2).run(_loads, states, WIRE) == ["", ""]


def _scaled() -> tuple[float, float]:
    """The loss scale grows in every second window."""
    rank, world = me()
    model = _Fixed(rank)
    sync = pe.GradSync(model, accumulate=1, wire=WIRE)
    step_while_the_scale_grows(sync, model, 12)
    terms = [target / world for target in _targets(world)]
    far = torch.cat([param.detach() for param in model.params]).double() + 12 * sum(terms)
    return float(far.abs().max()), _lost(terms)


def test_residuals_follow_the_loss_scale(ranks):
    for far, most in ranks(2).run(_scaled):
        assert far <= most + 12 * 8 * 8 * 2.0**-24
