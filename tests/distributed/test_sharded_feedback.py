"""Error feedback under FSDP2: the bits of plain PyTorch, what many windows bring together, and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import me, step_while_the_scale_grows
from marks import rest
from sharded_cases import items
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from wire_cases import FEEDBACK, INT8

import pyengine as pe

BF16, WIRE = FEEDBACK["bf16"], FEEDBACK["int8"]
STEP = 0.50004 / 127  # what Int8 may lose of the largest value of a block
KINDS = [("flat", 1), ("flat", 3), ("hsdp", 4), *rest(("flat", 2), ("nested", 4))]
SHAPES = {"odd": (5, 3), "row": (1, 7), "wide": (2, 12), "long": (131,)}


class _Fixed(nn.Module):
    """Its gradient is numbers of this rank's own, by parameter, which bfloat16 holds."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        super().__init__()
        self.targets = {}
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(SHAPES[name])))
            generator = torch.Generator().manual_seed(100 * rank + len(name) * sum(SHAPES[name]))
            self.targets[name] = torch.randn(SHAPES[name], generator=generator).bfloat16().float()

    def forward(self, scale: float) -> Tensor:
        return sum((getattr(self, name) * target).sum() for name, target in self.targets.items()) * scale


class _Both(nn.Module):
    """Two of them, each of which may be a unit."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.last = _Fixed(rank, ["odd", "row"]), _Fixed(rank, ["wide", "long"])

    def forward(self, scale: float) -> Tensor:
        return self.first(scale) + self.last(scale)


def _targets(rank: int) -> dict[str, Tensor]:
    model = _Both(rank)
    return {
        f"{name}.{key}": target
        for name, part in model.named_children()
        for key, target in part.targets.items()
    }


def _made(kind: str, wire: pe.wire.Wire, **options: Any) -> tuple[pe.Sync, nn.Module]:
    model, mesh = _Both(me()[0]), None
    if kind == "own":
        return pe.GradSync(model, accumulate=2, wire=wire), model
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    if kind == "columns":  # not along its first dimension
        options["shard_placement_fn"] = lambda param: Shard(1) if param.shape == SHAPES["wide"] else Shard(0)
    attach = {name: options.pop(name) for name in ("defer", "defer_budget_mb") if name in options}
    if kind == "narrow":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind != "flat":
        fully_shard(model.last, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return pe.attach(model, accumulate=2, wire=wire, **attach), model


def _whole(param: Any) -> Tensor:
    return param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad.clone()


def _train(sync: pe.Sync, model: nn.Module, first: int, windows: int) -> list[dict[str, Tensor]]:
    """Train windows from the `first` on, of two micro-batches and any counts; return the mean gradients."""
    rank, _ = me()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for number, window in enumerate(sync.windows([1.0] * (2 * windows)), first):
        for index, scale in enumerate(window):
            sync.backward(model(scale), count=items(rank, 2 * number + index))
        sync.step(optimizer)
        sync.unscale_()
        found.append({name: _whole(param) for name, param in model.named_parameters()})
        optimizer.zero_grad()
    return found


def _count(world: int, window: int) -> int:
    return sum(items(rank, 2 * window + index) for rank in range(world) for index in range(2))


def _reference(kind: str, world: int, windows: int) -> list[dict[str, Tensor]]:
    """Return the same of one process: what bfloat16 loses of a rank's values goes with its next ones."""
    targets = [_targets(rank) for rank in range(world)]
    lost = [{name: torch.zeros_like(target) for name, target in mine.items()} for mine in targets]
    found = []
    for window in range(windows):
        inverse = torch.tensor(1.0 / _count(world, window), dtype=torch.float64).float()
        sent: list[dict[str, Tensor]] = []
        for mine, kept in zip(targets, lost, strict=True):
            values = {name: (target + target) * inverse + kept[name] for name, target in mine.items()}
            sent.append({name: value.bfloat16().float() for name, value in values.items()})
            kept.update({name: value - sent[-1][name] for name, value in values.items()})
        # Of shards in the order of ranks; with replicas of two shards (0, 1) and (2, 3), then of those.
        groups = [sent[:2], sent[2:]] if kind == "hsdp" else [sent]
        sums = [{name: sum(term[name] for term in group) for name in sent[0]} for group in groups]
        found.append({name: sum(part[name] for part in sums) for name in sent[0]})
    return found


def _has_the_bits_of_the_reference(kind: str) -> None:
    _, world = me()
    if world == 1:  # nothing travels, and nothing is lost
        sync, model = _made(kind, BF16)
        (got,) = _train(sync, model, 0, 1)
        inverse = torch.tensor(1.0 / _count(1, 0), dtype=torch.float64).float()
        for name, target in _targets(0).items():
            assert torch.equal(got[name], 2 * target * inverse)
        assert sync.state_dict()["rank 0 of 1"][0].get("residuals", {}) == {}
        return
    for got, right in zip(_train(*_made(kind, BF16), 0, 4), _reference(kind, world, 4), strict=True):
        for name, value in right.items():
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize(("kind", "world"), [*KINDS, ("narrow", 2), ("columns", 3)])
def test_every_window_has_the_bits_of_plain_error_feedback(ranks, kind, world):
    ranks(world).run(_has_the_bits_of_the_reference, kind)


WINDOWS = 30


def _means(kind: str) -> list[tuple[float, float]]:
    """Return how far the sum of all gradients is from the true one, fed back and not, and what may be."""
    _, world = me()
    found = []
    for wire in (WIRE, INT8):
        got = _train(*_made(kind, wire), 0, WINDOWS)
        far = most = 0.0
        largest = 0.0
        for name in got[0]:
            terms = [2 * _targets(rank)[name].double() for rank in range(world)]
            right = sum(sum(terms) / _count(world, window) for window in range(WINDOWS))
            far = max(far, float((sum(grads[name].double() for grads in got) - right).abs().max()))
        for window in range(WINDOWS):
            # A rank keeps at most STEP of its largest value v, which is its term and what it kept: so of all
            # terms T together at most STEP T / (1 - STEP).
            terms = [max(float(t.abs().max()) for t in _targets(rank).values()) for rank in range(world)]
            largest = max(largest, 2 * sum(terms) / _count(world, window))
        most = STEP * largest / (1 - STEP)
        found.append((far, most + WINDOWS * 8 * 8 * 2.0**-24))  # and float32's own additions
    return found


@pytest.mark.parametrize(("kind", "world"), [("flat", 2), *rest(("nested", 3), ("hsdp", 4))])
def test_what_has_arrived_over_many_windows_lacks_what_one_window_loses(ranks, kind, world):
    for (far, most), (without, _) in ranks(world).run(_means, kind):
        assert far <= most < without / 3


def _kept(sync: pe.Sync) -> dict[str, Tensor]:
    rank, world = me()
    return sync.state_dict()[f"rank {rank} of {world}"][0].get("residuals", {})


def _saved(kind: str, wire: pe.wire.Wire = WIRE) -> tuple[dict[str, Any], dict[str, Tensor], list[Any]]:
    """Return a state after three windows, its residuals, and the gradients of two more windows."""
    sync, model = _made(kind, wire)
    _train(sync, model, 0, 3)
    state = sync.state_dict()
    return state, _kept(sync), _train(sync, model, 3, 2)


def _goes_on(kind: str, states: list[dict[str, Any]], wire: pe.wire.Wire = WIRE) -> tuple[Any, list[Any]]:
    rank, world = me()
    sync, model = _made(kind, wire)
    sync.load_state_dict(states[rank] if len(states) == world else states)
    kept = _kept(sync)
    return kept, _train(sync, model, 3, 2)


BY_CHANCE = pe.wire.ErrorFeedback(pe.wire.Int8(block=32, rounding="stochastic"))


@pytest.mark.parametrize(("kind", "world"), [("flat", 3), ("columns", 2), *rest(("hsdp", 4))])
@pytest.mark.parametrize("wire", [WIRE, BY_CHANCE], ids=["nearest", "stochastic"])
def test_a_state_goes_on_with_the_same_bits(ranks, kind, world, wire):
    saved = ranks(world).run(_saved, kind, wire)
    found = ranks(world).run(_goes_on, kind, [state for state, _, _ in saved], wire)
    for (_, kept, right), (again, got) in zip(saved, found, strict=True):
        assert kept.keys() == again.keys() == _targets(0).keys()
        assert all(torch.equal(again[name], part) for name, part in kept.items())
        for window, other in zip(right, got, strict=True):
            assert all(torch.equal(other[name], grad) for name, grad in window.items())


def _sum_of(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for part in parts for name in part}
    return {name: sum(part[name].double() for part in parts if name in part) for name in names}


@pytest.mark.parametrize(
    ("saves", "before", "loads", "after"),
    [("flat", 3, "nested", 2), ("hsdp", 4, "own", 3), *rest(("own", 2, "hsdp", 4), ("flat", 2, "flat", 4))],
)
def test_another_number_of_ranks_or_owner_keeps_the_same_sum(ranks, saves, before, loads, after):
    saved = ranks(before).run(_saved, saves)
    found = _sum_of([kept for kept, _ in ranks(after).run(_goes_on, loads, [s for s, _, _ in saved])])
    right = _sum_of([kept for _, kept, _ in saved])
    assert found.keys() == right.keys() == _targets(0).keys()
    for name, part in right.items():
        assert part.any()
        # A sum of at most two float32 numbers a rank.
        assert torch.allclose(found[name], part, rtol=0, atol=float(part.abs().max()) * 4 * 2.0**-24)


def _skips() -> tuple[bool, dict[str, Tensor], bool]:
    rank, _ = me()
    sync, model = _made("nested", WIRE)
    _train(sync, model, 0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in sync.windows([1.0, 1.0]):
        for scale in window:
            sync.backward(model(scale * (float("inf") if rank == 1 else 1.0)))
        stepped = bool(sync.step(optimizer))
        optimizer.zero_grad()
    kept = _kept(sync)
    (after,) = _train(sync, model, 0, 1)
    return stepped, kept, all(bool(grad.isfinite().all()) for grad in after.values())


def test_a_window_that_is_not_finite_takes_the_residuals_with_it_on_every_rank(ranks):
    for stepped, kept, is_finite in ranks(2).run(_skips):
        assert not stepped and is_finite
        assert kept and not any(part.any() for part in kept.values())


def _scaled() -> tuple[float, float]:
    """The loss scale grows in every second window."""
    _, world = me()
    sync, model = _made("flat", WIRE)
    step_while_the_scale_grows(sync, model, 24)
    far = 0.0
    for name, param in model.named_parameters():
        right = sum(_targets(other)[name].double() for other in range(world)) / world
        far = max(far, float((param.detach().full_tensor().double() + 12 * right).abs().max()))
    largest = [max(float(t.abs().max()) for t in _targets(other).values()) / world for other in range(world)]
    return far, STEP * sum(largest) / (1 - STEP)


def test_residuals_follow_the_loss_scale(ranks):
    for far, most in ranks(2).run(_scaled):
        assert far <= most + 12 * 8 * 8 * 2.0**-24


def _flushed() -> list[dict[str, Tensor]]:
    """End windows behind their backwards: FSDP reduces in one more, of zeros."""
    rank, _ = me()
    sync, model = _made("nested", BF16)
    found = []
    for number in range(3):
        for index in range(2):
            with sync.accumulate(last=False):
                sync.backward(model(1.0), count=items(rank, 2 * number + index))
        sync.flush()
        sync.unscale_()
        found.append({name: _whole(param) for name, param in model.named_parameters()})
        model.zero_grad()
    return found


def test_a_flushed_window_is_one_of_the_same_residuals(ranks):
    for found in ranks(2).run(_flushed):
        for got, right in zip(found, _reference("nested", 2, 3), strict=True):
            assert all(torch.equal(got[name], value) for name, value in right.items())


def _refused(options: dict[str, Any], kind: str) -> str:
    with pytest.raises(ValueError) as error:
        _made(kind, WIRE, **options)
    return str(error.value)


@pytest.mark.parametrize("options", [{"defer": "none"}, {"defer_budget_mb": 0.0}], ids=str)
def test_feedback_needs_the_count_before_a_unit_reduces(ranks, options):
    for message in ranks(2).run(_refused, options, "nested"):
        assert "which sends gradients before the window's count is known (defer='none')" in message
        assert "of mean gradients: use defer='all'" in message
