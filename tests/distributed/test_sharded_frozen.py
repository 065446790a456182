"""Parameters of one unit that are frozen in turn, or in the middle of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import me
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wire_cases import FEEDBACK

import pyengine as pe

SHAPE = (5, 3)  # of both, so that either may have the other's offset in the scattered buffer
LARGEST = {"a": 1000.0, "b": 1e-3}
PLAN = ["ab", "a", "b", "b", "ab", "a", "b"]


class _Two(nn.Module):
    """A module with two parameters, whose gradients are its targets."""

    def __init__(self, targets: dict[str, Tensor]) -> None:
        super().__init__()
        self.targets = targets
        self.a, self.b = (nn.Parameter(torch.zeros(SHAPE)) for _ in "ab")

    def forward(self, uses: str) -> Tensor:
        return sum((getattr(self, name).float() * self.targets[name]).sum() for name in uses)


def _random(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(SHAPE, generator=generator) * size for name, size in LARGEST.items()}


def _whole(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randint(-9, 10, SHAPE, generator=generator).float() for name in LARGEST}


def _made(
    targets: dict[str, Tensor], wire: pe.wire.Wire, accumulate: int, **options: Any
) -> tuple[pe.Sync, nn.Module]:
    model = fully_shard(_Two(targets), **options)
    return pe.attach(model, accumulate=accumulate, wire=wire), model


def _freeze(model: nn.Module, trained: str) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)


def _ended(sync: pe.Sync, model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync.step(optimizer)
    sync.unscale_()
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    return found


def _fed_back(world: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return the gradients of all windows, and the residuals at the end, computed in one process.

    What rounding to bfloat16 loses of a parameter is added to the same parameter's next values.
    """
    targets = [_random(rank) for rank in range(world)]
    lost = [{name: torch.zeros(SHAPE) for name in LARGEST} for _ in targets]
    inverse = torch.tensor(1.0 / world, dtype=torch.float64).float()
    found = []
    for trained in PLAN:
        sums = {name: torch.zeros(SHAPE) for name in trained}
        for mine, kept in zip(targets, lost, strict=True):
            for name in trained:
                value = mine[name] * inverse + kept[name]
                sent = value.bfloat16().float()
                sums[name] += sent
                kept[name] = value - sent
        found.append(sums)
    return found, lost


@on_ranks(2)
def test_equal_parameters_that_are_trained_in_turn_keep_residuals_of_their_own():
    rank, world = me()
    right, lost = _fed_back(world)
    sync, model = _made(_random(rank), FEEDBACK["bf16"], 1)
    for trained, want in zip(PLAN, right, strict=True):
        _freeze(model, trained)
        with sync.accumulate():
            sync.backward(model("ab"), count=1)
        got = _ended(sync, model)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], value) for name, value in want.items())
    kept = sync.state_dict()[f"rank {rank} of {world}"][0]["residuals"]
    assert all(torch.equal(kept[name], part.view(-1)) for name, part in lost[rank].items())


WIRES = {"fp32": pe.wire.FP32(), "int8": pe.wire.ErrorFeedback(pe.wire.Int8())}


def _within(kind: str, wire: str) -> list[dict[str, Tensor]]:
    """Freeze a parameter after a micro-batch has used it; train both in the last window; return gradients."""
    options: dict[str, Any] = {}
    if kind == "narrow":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sync, model = _made(_whole(me()[0]), WIRES[wire], 2, **options)
    found = []
    for first, trained in (("a", "b"), ("ab", "b"), ("ab", "ab")):
        for uses in (first, "ab"):
            with sync.accumulate():
                sync.backward(model(uses), count=1)
            _freeze(model, trained)
        found.append(_ended(sync, model))
        if len(found) == 2:
            _freeze(model, "ab")
    return found


@pytest.mark.parametrize(("kind", "world", "wire"), [("flat", 2, "int8"), ("narrow", 3, "fp32")])
def test_what_came_before_a_parameter_was_frozen_counts(ranks, kind, world, wire):
    targets = [_whole(rank) for rank in range(world)]
    sums = {name: sum(mine[name] for mine in targets) for name in LARGEST}
    inverse = torch.tensor(1.0 / (2 * world), dtype=torch.float64).float()
    # How many micro-batches of a window have a gradient; in the second window, "a" is frozen throughout.
    right = [{"a": 1, "b": 1}, {"b": 2}, {"a": 2, "b": 2}]
    # In two of the three windows, int8 loses at most half a step of a rank's largest value, which is
    # 9 * 2 / count plus the residual: less than a whole step each.
    far = 0.0 if wire == "fp32" else world * 2 * 18 * float(inverse) / 127
    for found in ranks(world).run(_within, kind, wire):
        for got, times in zip(found, right, strict=True):
            assert got.keys() == times.keys()
            for name, number in times.items():
                want = sums[name] * number * inverse
                assert torch.allclose(got[name], want, rtol=0, atol=far + 2.0**-22), name
