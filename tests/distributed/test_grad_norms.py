"""Norms per parameter: `grad_norms`, norms in records, and clipping per parameter or group."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from cases import Integers, assert_alike, engine, grads, integers, me, records_of, window_of_integers
from meshes import Block, cut, mesh_of
from ranks import on_ranks
from sharded_cases import loss_of, own_batches, sharded, whole_grads
from torch import Tensor, nn

import pyengine as pe


def _norms_of(grads: dict[str, Tensor | None]) -> dict[str, float]:
    return {name: 0.0 if grad is None else grad.double().norm().item() for name, grad in grads.items()}


def _assert_norms(found: dict[str, Tensor], want: dict[str, float]) -> None:
    """Check norms on all ranks; squares of the same elements are summed in float64, in a different order."""
    assert {name: norm.item() for name, norm in found.items()} == pytest.approx(want, rel=1e-6)
    assert all(norm.dtype == torch.float64 and norm.dim() == 0 for norm in found.values())
    assert_alike({name: norm.item() for name, norm in found.items()})


@pytest.mark.parametrize("kind", ["own", "own-native", "own-exact", "attach"])
@on_ranks(2)
def test_norms_of_a_window_are_those_of_the_mean(kind):
    model = Integers(torch.float32)
    model.scalar.requires_grad_(False)
    sync, forward = engine(kind, model, accumulate=2)
    sync.measure(pe.GradNorms())
    want = _norms_of(window_of_integers(sync, forward, model))
    want.pop("scalar", None)
    _assert_norms(sync.grad_norms(), want)
    sync.clip_grad_norm_(sync.grad_norm().item() / 2)
    _assert_norms(sync.grad_norms(), {name: norm / 2 for name, norm in want.items()})
    model.bias.grad.zero_()
    assert sync.grad_norms()["bias"] == 0
    sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    found = sync.last_record.grad_norms
    assert found == pytest.approx(want)  # before clipping, like `grad_norm`
    assert math.hypot(*found.values()) == pytest.approx(sync.last_record.grad_norm)
    assert_alike(found)


@pytest.mark.parametrize(
    ("kind", "world", "is_measured"), [("flat", 3, True), ("hsdp", 4, True), ("replicate", 2, False)]
)
@on_ranks()
def test_norms_of_sharded_parameters_are_over_all_shards(kind, is_measured):
    """`grad_norms` does not need `pe.GradNorms`, which only adds the norms to records."""
    sync, model = sharded(kind)
    if is_measured:
        sync.measure(pe.GradNorms())
    optimizer, records = torch.optim.SGD(model.parameters(), lr=0.1), records_of(sync)
    for window in sync.windows(own_batches(3)):
        for data in window:
            sync.backward(loss_of(model, data), count=3)
        sync.flush()
        want = _norms_of(whole_grads(model))
        _assert_norms(sync.grad_norms(), want)
        norm = sync.clip_grad_norm_(0.5, per={"first": ["first.weight", "first.bias"]})
        factor = min(1.0, 0.5 / (math.hypot(want["first.weight"], want["first.bias"]) + 1e-6))
        clipped = {
            name: norm * (factor if name in ("first.weight", "first.bias") else 1)
            for name, norm in want.items()
        }
        _assert_norms(sync.grad_norms(), clipped)
        assert _norms_of(whole_grads(model)) == pytest.approx(clipped, rel=1e-5)
        assert sync.grad_norm().item() == pytest.approx(math.hypot(*clipped.values()), rel=1e-5)
        sync.step(optimizer)
    assert norm.item() == pytest.approx(math.hypot(*want.values()))
    assert records[0].grad_norms == (pytest.approx(want) if is_measured else None)


@on_ranks(2)
def test_a_mesh_of_tensor_parallel_ranks_has_the_norms_of_whole_parameters():
    mesh = mesh_of(dp=1, tp=2)
    twin = Block(torch.float64)
    model = cut(Block(torch.float32), mesh)
    sync = pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(replicate="dp"))
    x = torch.arange(12.0).reshape(2, 6) / 12
    twin(x.double()).square().sum().backward()
    for window in sync.windows([x]):
        for each in window:
            sync.backward(model(each).square().sum())
        want = {name: param.grad.norm().item() for name, param in twin.named_parameters()}
        found = sync.grad_norms()
        assert {name: norm.item() for name, norm in found.items()} == pytest.approx(want, rel=1e-4)
        sync.clip_grad_norm_(0.1, per="parameter")
        assert max(sync.grad_norms().values()).item() == pytest.approx(0.1, rel=1e-4)
        sync.unscale_()
    assert_alike({name: norm.item() for name, norm in found.items()})


@on_ranks(2)
def test_ranks_with_other_parameters_know_each_other_s_norms():
    rank, _ = me()
    mesh = mesh_of(dp=1, pp=2)
    model = nn.Module()
    name = ["early", "late"][rank]
    setattr(model, name, nn.Parameter(torch.ones(2)))
    sync = pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(replicate="dp", shard="pp"))
    with sync.accumulate(), sync.micro_batch(count=1):
        (getattr(model, name) * (3.0 + rank)).sum().backward()
    _assert_norms(sync.grad_norms(), {"early": 3 * 2**0.5, "late": 4 * 2**0.5})
    sync.clip_grad_norm_(1.0, per={"late only": ["late"]})
    _assert_norms(sync.grad_norms(), {"early": 3 * 2**0.5, "late": 1.0})
    assert getattr(model, name).grad.norm().item() == pytest.approx([3 * 2**0.5, 1.0][rank], rel=1e-5)
    sync.unscale_()


@pytest.mark.parametrize("kind", ["own", "own-native", "attach"])
@on_ranks(2)
def test_each_parameter_or_group_is_clipped_by_its_own_norm(kind):
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    for per in ("parameter", {"a": ["matrix", model.bias], "b": [model.long]}):
        want = window_of_integers(sync, forward, model)
        norm = sync.clip_grad_norm_(0.25, per=per)
        groups = [[name] for name in want] if per == "parameter" else [["matrix", "bias"], ["long"]]
        for group in groups:
            whole = math.hypot(*(want[name].norm().item() for name in group))
            for name in group:
                want[name] *= min(1.0, 0.25 / (whole + 1e-6))
        torch.testing.assert_close(grads(model), want, rtol=1e-6, atol=0)
        total = math.hypot(*(grad.norm().item() for grad in want.values()))
        assert sync.grad_norm().item() == pytest.approx(total, rel=1e-6)
        assert norm.item() > total
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@on_ranks(2)
def test_ranks_that_clip_other_groups_are_found():
    model = Integers(torch.float32)
    sync = pe.GradSync(model)
    with pytest.raises(RuntimeError, match="used the last window differently"):
        for window in sync.windows([integers(k) for k in range(2)]):
            for data in window:
                sync.backward(model(*data), count=3)
            sync.clip_grad_norm_(0.25, per={"one": [["matrix", "long"][me()[0]]]})
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize(
    ("per", "kind", "message"),
    [
        ("layer", TypeError, "per='layer': expected \"parameter\", or a dict"),
        ({}, ValueError, "expected at least one group"),
        ({"a": "weight"}, TypeError, r"per\['a'\] is a str"),
        ({"a": []}, ValueError, r"per\['a'\] is empty"),
        ({"a": ["wieght"]}, ValueError, "'wieght', which is not one of the engine's parameters: 'weight'"),
        ({"a": ["weight"], "b": ["weight"]}, ValueError, "'weight', which is already in group 'a'"),
    ],
)
@on_ranks(1)
def test_wrong_groups_are_refused_and_nothing_is_clipped(per, kind, message):
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model)
    for window in sync.windows([torch.ones(1, 2)]):
        for x in window:
            sync.backward(model(x).sum())
        with pytest.raises(kind, match=message):
            sync.clip_grad_norm_(1e-3, per=per)
        with pytest.raises(ValueError, match="norm_type=inf with per="):
            sync.clip_grad_norm_(1e-3, math.inf, per="parameter")
        assert torch.equal(model.weight.grad, torch.ones(1, 2))
        sync.unscale_()


@on_ranks(2)
def test_wrong_measures_are_refused_on_every_rank():
    rank, _ = me()
    sync = pe.GradSync(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"^rank 1: measure: expected pe\.GradNorms.*, got a type"):
        sync.measure(pe.GradNorms() if rank == 0 else pe.GradNorms)
    with pytest.raises(ValueError, match=r"measure got \[\], which differs between ranks"):
        sync.measure(*[pe.GradNorms()][:rank])
    sync.measure(pe.GradNorms())
    with pytest.raises(ValueError, match="got a second GradNorms"):
        sync.measure(pe.GradNorms())


@pytest.mark.parametrize("make", [pe.GradNorms, pe.NoiseScale, partial(pe.SpikePolicy, factor=2.0)])
@on_ranks(2)
def test_a_measure_of_another_engine_is_refused(make):
    measure = make()
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model)
    sync.measure(measure)
    with pytest.raises(ValueError, match=r"was given to another engine: create one for each engine"):
        pe.GradSync(nn.Linear(3, 1)).measure(measure)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())
    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert math.isfinite(sync.last_record.grad_norm)
