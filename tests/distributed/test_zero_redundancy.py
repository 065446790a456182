"""`ZeroRedundancyOptimizer`, in which each rank has the state of some parameters, used with engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Integers, assert_alike, assert_same, integers, me
from ranks import on_ranks
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.step.stepper import PlainStepper

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}


def _plain(kind: str) -> Make:
    made, settings = KINDS[kind]
    return functools.partial(made, **settings)


def _sharded(kind: str, **options: Any) -> Make:
    made, settings = KINDS[kind]
    return functools.partial(ZeroRedundancyOptimizer, optimizer_class=made, **options, **settings)


def _engine(owner: str, **options: Any) -> tuple[pe.Sync, nn.Module]:
    model = Integers(torch.float32)
    if owner == "attach":
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return pe.attach(ddp, accumulate=2, **options), ddp
    return pe.GradSync(model, accumulate=2, **options), model


def _train(
    sync: pe.Sync, model: nn.Module, optimizer: torch.optim.Optimizer, windows: range, **how: bool
) -> list[bool]:
    """Train windows of two micro-batches per rank; return which windows stepped.

    All ranks together have the same items in a window for every world size.
    """
    stepped, (rank, world) = [], me()
    for number in windows:
        for k in range(2):
            items = [integers(100 * number + place) for place in range(12)][6 * k : 6 * k + 6][rank::world]
            with sync.accumulate():
                losses = torch.stack([model(*item) for item in items])
                bad = torch.inf if how.get("is_skipped") and number == 1 and rank == world - 1 else 1.0
                sync.backward(losses.sum() * bad, count=3 * len(items))
        if how.get("clips"):
            sync.clip_grad_norm_(0.1)
        stepped.append(bool(sync.step(optimizer)))
    return stepped


def _params(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _trained(owner: str, make: Make, **how: bool) -> tuple[dict[str, torch.Tensor | None], list[bool]]:
    sync, model = _engine(owner)
    if how.get("is_scaled"):
        sync.scaler = pe.GradScaler("cpu", init_scale=1024.0)
    stepped = _train(sync, model, make(model.parameters()), range(3), **how)
    sync.close()
    return _params(model), stepped


@pytest.mark.parametrize(
    "how",
    [{"clips": True}, {"is_skipped": True}, {"is_scaled": True, "is_skipped": True, "clips": True}],
    ids=lambda how: " ".join(how),
)
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("adamw", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("sgd", 1), ("adamw fused", 3), ("adamw", 4)]
        ),
    ],
)
@pytest.mark.parametrize("owner", ["GradSync", "attach"])
@on_ranks()
def test_parameters_have_the_bits_of_the_plain_optimizer(world, owner, kind, how):
    want, want_stepped = _trained(owner, _plain(kind), **how)
    assert want_stepped == [True, not how.get("is_skipped"), True]
    for options in ({}, {"parameters_as_bucket_view": True}):
        params, stepped = _trained(owner, _sharded(kind, **options), **how)
        assert stepped == want_stepped
        assert_same(params, want)


@on_ranks(2)
def test_each_rank_has_the_state_of_its_share_of_the_parameters():
    sync, model = _engine("GradSync")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    _train(sync, model, optimizer, range(1))
    mine = {id(param) for param in optimizer.optim.state}
    shares: list[Any] = [None] * 2
    torch.distributed.all_gather_object(shares, [id(param) in mine for param in model.parameters()])
    assert [a + b for a, b in zip(*shares, strict=True)] == [1, 1, 1, 1]
    assert all(map(any, shares))
    assert PlainStepper().needs_host(optimizer)  # the device can skip only torch.optim's own optimizers


@on_ranks(2)
def test_a_wrapped_optimizer_and_its_scheduler_step_once_a_window():
    def trained(make: Make) -> dict[str, torch.Tensor | None]:
        sync, model = _engine("GradSync")
        plain = make(model.parameters())
        optimizer = sync.wrap(plain, torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5))
        for place in range(6):
            with sync.accumulate():
                sync.backward(model(*integers(10 * me()[0] + place)), count=3)
                optimizer.step()
                optimizer.zero_grad()
        sync.close()
        assert plain.param_groups[0]["lr"] == 0.01 / 8
        return _params(model)

    assert_same(trained(_sharded("adamw")), trained(_plain("adamw")))


def _save(owner: str, path: str) -> None:
    """Train two windows and save as in the documentation: rank 0 has the optimizer states of every rank."""
    sync, model = _engine(owner)
    optimizer = _sharded("adamw")(model.parameters())
    _train(sync, model, optimizer, range(2))
    torch.save(sync.state_dict(), f"{path}-{me()[0]}")
    optimizer.consolidate_state_dict(to=0)
    if me()[0] == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def _go_on(owner: str, path: str, *, is_plain: bool) -> dict[str, torch.Tensor | None]:
    sync, model = _engine(owner)
    optimizer = (_plain if is_plain else _sharded)("adamw")(model.parameters())
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    own = me()[0] if me()[1] == 2 else 0
    sync.load_state_dict(torch.load(f"{path}-{own}", weights_only=True))
    assert sync.window == 2
    _train(sync, model, optimizer, range(2, 4))
    assert_alike([param.tolist() for param in model.parameters()])
    return _params(model)


@pytest.mark.parametrize(
    ("owner", "world", "is_plain"),
    [
        ("GradSync", 2, False),
        ("GradSync", 1, True),
        ("GradSync", 3, False),
        pytest.param("GradSync", 1, False, marks=pytest.mark.slow),
        pytest.param("attach", 4, False, marks=pytest.mark.slow),
    ],
)
def test_a_state_goes_on_on_any_number_of_ranks_and_in_the_plain_optimizer(
    ranks, tmp_path: Path, owner, world, is_plain
):
    path = str(tmp_path / "state.pt")
    want, _ = ranks(2).run(_uninterrupted, owner)
    ranks(2).run(_save, owner, path)
    for params in ranks(world).run(_go_on, owner, path, is_plain=is_plain):
        assert_same(params, want)


def _uninterrupted(owner: str) -> dict[str, torch.Tensor | None]:
    sync, model = _engine(owner)
    _train(sync, model, _plain("adamw")(model.parameters()), range(4))
    return _params(model)


@pytest.mark.parametrize("owner", ["GradSync", "attach"])
@on_ranks(2)
def test_an_optimizer_that_steps_in_ddp_s_hook_is_refused(owner):
    sync, model = _engine(owner)
    optimizer = _sharded("sgd", overlap_with_ddp=True)(model.parameters())
    with pytest.raises(TypeError, match="overlap_with_ddp=True, .*: leave overlap_with_ddp out"):
        _train(sync, model, optimizer, range(1))
    with pytest.raises(TypeError, match="leave overlap_with_ddp out"):
        sync.wrap(optimizer)
