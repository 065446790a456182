"""Error feedback for every owner of gradients: bits of plain PyTorch, sums of many windows, and states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from cases import Breaks, me, recorded_warnings
from marks import rest
from ranks import on_ranks
from sharded_cases import items
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from wire_cases import FEEDBACK

import pyengine as pe

BF16, WIRE = FEEDBACK["bf16"], FEEDBACK["int8"]
BY_CHANCE = pe.wire.ErrorFeedback(pe.wire.Int8(block=32, rounding="stochastic"))
STEP = 0.50004 / 127  # Int8's largest error, relative to the largest value of a block
WINDOWS = 12
SHAPES = {"odd": (5, 3), "row": (1, 7), "wide": (2, 12), "long": (131,)}


class _Fixed(nn.Module):
    """A model whose gradients are constants of this rank, which are exact in bfloat16."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        super().__init__()
        self.targets = {}
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(SHAPES[name])))
            generator = torch.Generator().manual_seed(100 * rank + len(name) * sum(SHAPES[name]))
            self.targets[name] = torch.randn(SHAPES[name], generator=generator).bfloat16().float()

    def forward(self, scale: float) -> Tensor:
        # Reversed, so that gradients arrive in registration order, which is that of DDP's first buckets.
        pairs = [*self.targets.items()][::-1]
        return sum((getattr(self, name) * target).sum() for name, target in pairs) * scale


class _Both(nn.Module):
    """Two `_Fixed` modules, each of which may be an FSDP unit; the last is used only if `uses_all` is set."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.last = _Fixed(rank, ["odd", "row"]), _Fixed(rank, ["wide", "long"])
        self.uses_all = True

    def forward(self, scale: float) -> Tensor:
        return self.last(scale) + self.first(scale) if self.uses_all else self.first(scale)


def _targets(rank: int) -> dict[str, Tensor]:
    parts = _Both(rank).named_children()
    return {f"{name}.{key}": target for name, part in parts for key, target in part.targets.items()}


def _made(kind: str, wire: pe.wire.Wire, **options: Any) -> tuple[pe.Sync, _Both, nn.Module]:
    model, mesh = _Both(me()[0]), None
    if kind == "own":
        return pe.GradSync(model, accumulate=2, wire=wire), model, model
    if kind.startswith("attach"):
        ddp = DistributedDataParallel(model, bucket_cap_mb=25 if kind == "attach, one bucket" else 1e-5)
        return pe.attach(ddp, accumulate=2, wire=wire), model, ddp
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    if kind == "columns":  # not sharded along the first dimension
        options["shard_placement_fn"] = lambda param: Shard(1) if param.shape == SHAPES["wide"] else Shard(0)
    attach = {name: options.pop(name) for name in ("defer", "defer_budget_mb") if name in options}
    if kind == "narrow":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind != "flat":
        fully_shard(model.last, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return pe.attach(model, accumulate=2, wire=wire, **attach), model, model


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def _train(made: tuple[pe.Sync, nn.Module, nn.Module], first: int, windows: int) -> list[dict[str, Tensor]]:
    """Train windows of two micro-batches with varying counts, from `first` on; return mean gradients."""
    sync, model, forward = made
    rank, _ = me()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for number, window in enumerate(sync.windows([1.0] * (2 * windows)), first):
        for index, scale in enumerate(window):
            sync.backward(forward(scale), count=items(rank, 2 * number + index))
        sync.step(optimizer)
        sync.unscale_()
        found.append(_grads(model))
        optimizer.zero_grad()
    return found


def _count(world: int, window: int) -> int:
    return sum(items(rank, 2 * window + index) for rank in range(world) for index in range(2))


def _reference(kind: str, world: int, windows: int) -> list[dict[str, Tensor]]:
    """Return the gradients of one process, where a rank's bfloat16 errors are added to its next values."""
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
        # Sum over shards in the order of ranks; with HSDP over (0, 1) and (2, 3), then over these replicas.
        groups = [sent[:2], sent[2:]] if kind == "hsdp" else [sent]
        sums = [{name: sum(term[name] for term in group) for name in sent[0]} for group in groups]
        found.append({name: sum(part[name] for part in sums) for name in sent[0]})
    return found


@pytest.mark.parametrize(
    ("kind", "world"), [("flat", 1), ("hsdp", 4), ("narrow", 2), ("columns", 3), *rest(("flat", 3))]
)
@on_ranks()
def test_every_window_over_a_sharded_model_has_the_bits_of_plain_error_feedback(kind):
    _, world = me()
    if world == 1:  # nothing is sent, and nothing is lost
        made = _made(kind, BF16)
        (got,) = _train(made, 0, 1)
        inverse = torch.tensor(1.0 / _count(1, 0), dtype=torch.float64).float()
        for name, target in _targets(0).items():
            assert torch.equal(got[name], 2 * target * inverse)
        assert _kept(made[0]) == {}
        return
    for got, right in zip(_train(_made(kind, BF16), 0, 3), _reference(kind, world, 3), strict=True):
        for name, value in right.items():
            assert torch.equal(got[name], value), name


def _distance(found: dict[str, Tensor], counts: Sequence[float]) -> tuple[float, float]:
    """Return the largest error of an element in the sum of all windows' gradients, and its bound.

    A rank keeps at most STEP of its largest value v, which is its term plus its residual: v <= term + kept.
    The owner of a part also loses STEP of the sum of all values. With T, the sum of the ranks' largest terms,
    K <= 2 STEP (T + K), or K <= 2 STEP T / (1 - 2 STEP). In each window, float32 also rounds the product with
    1/count, the residual and the sum of W values, each of a mean below 8.
    """
    targets = [_targets(rank) for rank in range(me()[1])]
    inverse = sum(1 / count for count in counts)
    right = {name: sum(2 * mine[name].double() for mine in targets) * inverse for name in targets[0]}
    far = max(float((found[name].double() - value).abs().max()) for name, value in right.items())
    total = sum(2 * max(float(t.abs().max()) for t in mine.values()) for mine in targets) / min(counts)
    return far, 2 * STEP * total / (1 - 2 * STEP) + len(counts) * 8 * 8 * 2.0**-24


def _sum_of(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value.double()
    return total


def _means(kind: str, scale_grows: bool) -> tuple[float, float]:
    made = _made(kind, WIRE)
    if scale_grows:
        made[0].scaler = pe.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    counts = [_count(me()[1], window) for window in range(WINDOWS)]
    return _distance(_sum_of(_train(made, 0, WINDOWS)), counts)


def _hook_means() -> tuple[float, float]:
    rank, world = me()
    ddp = DistributedDataParallel(_Both(rank), bucket_cap_mb=1e-5)
    ddp.register_comm_hook(pe.HookState(wire=WIRE), pe.comm_hook)
    found = []
    for _ in range(WINDOWS):
        ddp.zero_grad()
        ddp(1.0).backward()
        found.append(_grads(ddp.module))
    return _distance(_sum_of(found), [2 * world] * WINDOWS)


@pytest.mark.parametrize(
    ("world", "train", "case"),
    [
        (2, _means, ("own", True)),
        (3, _means, ("attach", False)),
        (2, _means, ("flat", True)),
        (2, _hook_means, ()),
    ],
    ids=[
        "own, under a loss scale that grows",
        "attach",
        "sharded, under a loss scale that grows",
        "the hook",
    ],
)
def test_what_has_arrived_over_many_windows_lacks_what_one_window_loses(ranks, world, train, case):
    for far, most in ranks(world).run(train, *case):
        assert far <= most


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_what_a_parameter_that_nobody_used_has_left_on_the_wire_is_not_in_the_norm(kind):
    sync, model, forward = _made(kind, WIRE)
    found = []
    for window in sync.windows(range(6)):
        for _ in window:
            sync.backward(forward(1.0))
        sync.unscale_()
        norm, grads = float(sync.clip_grad_norm_(float("inf"))), _grads(model)
        found.append((norm, float(torch.cat([grad.double().flatten() for grad in grads.values()]).norm())))
        assert len(grads) == (4 if model.uses_all else 2)
        model.uses_all = False
        model.zero_grad()
    for norm, of_grads in found:
        assert norm == pytest.approx(of_grads, rel=1e-6)  # a norm is computed in float32


def _kept(sync: pe.Sync) -> dict[str, Tensor]:
    rank, world = me()
    residuals = sync.state_dict()[f"rank {rank} of {world}"][0]["residuals"]
    return {name.removeprefix("module."): part for name, part in residuals.items()}


def _saved(kind: str, wire: pe.wire.Wire = WIRE) -> tuple[dict[str, Any], dict[str, Tensor], list[Any]]:
    """Return a state after three windows, its residuals, and the gradients of two more windows."""
    made = _made(kind, wire)
    _train(made, 0, 3)
    return made[0].state_dict(), _kept(made[0]), _train(made, 3, 2)


def _goes_on(kind: str, states: list[dict[str, Any]], wire: pe.wire.Wire = WIRE) -> tuple[Any, list[Any]]:
    made = _made(kind, wire)
    made[0].load_state_dict(states[me()[0]])
    return _kept(made[0]), _train(made, 3, 2)


@pytest.mark.parametrize(
    ("kind", "world", "wire"),
    [
        ("own", 2, BY_CHANCE),
        ("attach, one bucket", 2, WIRE),  # with more, the new engine's first window would have other blocks
        ("flat", 3, WIRE),
        ("columns", 2, BY_CHANCE),
    ],
    ids=str,
)
def test_a_state_goes_on_with_the_same_bits(ranks, kind, world, wire):
    saved = ranks(world).run(_saved, kind, wire)
    found = ranks(world).run(_goes_on, kind, [state for state, _, _ in saved], wire)
    for (_, kept, right), (again, got) in zip(saved, found, strict=True):
        assert kept.keys() == again.keys() == _targets(0).keys()
        assert all(torch.equal(again[name], part) for name, part in kept.items())
        for window, other in zip(right, got, strict=True):
            assert all(torch.equal(other[name], grad) for name, grad in window.items())


def _loads_without_memory(states: list[dict[str, Any]]) -> list[str]:
    with recorded_warnings() as messages:
        _made("own", pe.wire.Int8())[0].load_state_dict(states[me()[0]])
    return messages


def test_a_wire_that_keeps_nothing_says_that_residuals_are_lost(ranks):
    states = [state for state, *_ in ranks(2).run(_saved, "own")]
    messages, _ = ranks(2).run(_loads_without_memory, states)
    assert messages and "the state has residuals" in messages[0]


@pytest.mark.parametrize("kind", ["own", "attach", "nested"])
@on_ranks(2)
def test_a_window_that_is_not_used_leaves_nothing_behind(kind):
    """Rank 1 has inf in the second window, and fails in the fourth unless the model is sharded.

    All ranks abandon the fifth window.
    """
    rank, _ = me()
    sync, model, forward = _made(kind, WIRE)
    optimizer, stepped = torch.optim.SGD(model.parameters(), lr=0.0), []
    for number in range(6):
        Breaks.now = kind != "nested" and (number, rank) == (3, 1)
        try:
            for k in range(2):
                scale = float("inf") if (number, rank) == (1, 1) else 1.0
                loss = forward(scale)
                with sync.accumulate():
                    sync.backward(Breaks.apply(loss) if k == 1 else loss)
            if number == 4:
                sync.abandon()
            stepped.append(number != 4 and bool(sync.step(optimizer)))
        except MemoryError:
            stepped.append(False)
            sync.abandon()
        if stepped[-1]:
            assert all(grad.isfinite().all() for grad in _grads(model).values())
        kept = _kept(sync)
        assert kept and any(bool(part.any()) for part in kept.values()) == stepped[-1]
        optimizer.zero_grad()
    assert stepped == [True, False, True, kind == "nested", False, True]


def _second_window(change: str) -> list[Tensor]:
    """Return the gradients of the second of two windows, between which `change` may change the loss scale."""
    rank, _ = me()
    model = _Fixed(rank, ["odd", "wide"])
    sync = pe.GradSync(model, wire=WIRE)
    sync.scaler = pe.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(2):
        if number and change == "update":
            sync.scaler.update(4.0)
        elif number and change == "load_state_dict":
            sync.scaler.load_state_dict({**sync.scaler.state_dict(), "scale": 4.0})
        elif number and change == "none":
            sync.scaler = None
        elif number and change == "resume":
            state = sync.state_dict()
            sync.close()
            sync = pe.GradSync(model, wire=WIRE)
            sync.load_state_dict(state)
        with sync.accumulate():
            sync.backward(model(1.0))
        sync.step(optimizer)
    return [param.grad.clone() for param in model.parameters()]


def test_a_loaded_state_keeps_the_memory_that_a_captured_window_reads():
    sync = pe.GradSync([nn.Parameter(torch.ones(2))], wire=WIRE)
    sync.scaler = pe.GradScaler("cpu", init_scale=8.0)
    residuals = sync._engine.reducer.residuals
    memory = residuals._scale
    sync.load_state_dict(sync.state_dict())
    sync.scaler = None
    assert residuals._scale is memory and memory == 1


@on_ranks(2)
def test_residuals_follow_a_loss_scale_that_anybody_changes():
    kept, *others = map(_second_window, ["keep", "update", "load_state_dict", "none", "resume"])
    assert all(torch.equal(a, b) for other in others for a, b in zip(kept, other, strict=True))


@on_ranks(2)
def test_a_flushed_window_is_one_of_the_same_residuals():
    """Windows end after their backwards, so FSDP reduces in an additional backward of zeros."""
    rank, _ = me()
    sync, model, _ = _made("nested", BF16)
    found = []
    for number in range(3):
        for index in range(2):
            with sync.accumulate(last=False):
                sync.backward(model(1.0), count=items(rank, 2 * number + index))
        sync.flush()
        sync.unscale_()
        found.append(_grads(model))
        model.zero_grad()
    for got, right in zip(found, _reference("nested", 2, 3), strict=True):
        assert all(torch.equal(got[name], value) for name, value in right.items())


@pytest.mark.parametrize("options", [{"defer": "none"}, {"defer_budget_mb": 0.0}], ids=str)
@on_ranks(2)
def test_feedback_needs_the_count_before_a_unit_reduces(options):
    says = r"which sends gradients before the window's count is known \(defer='none'\).*use defer='all'"
    with pytest.raises(ValueError, match=says):
        _made("nested", WIRE, **options)
