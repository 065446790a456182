"""Clipping with PyTorch's function names: inf-norm, values, and norms that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from cases import OPTIMIZERS, Inject, assert_alike, clip_and_step, engine, me, records_of
from ranks import on_ranks
from sharded_cases import batch, loss_of, sharded
from torch import nn

import pyengine as pe

KINDS = ("own", "own-native", "own-exact", "attach")


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def _data(world: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(2, 6, generator=generator) for _ in range(3 - rank % 2)] for rank in range(world)]


def _twin(world: int) -> nn.Module:
    """Return a model with the gradient of the whole global batch, computed in float64 by one process."""
    twin = _model(torch.float64)
    batch = torch.cat([x for mine in _data(world) for x in mine]).double()
    (twin(batch).square().sum() / len(batch)).backward()
    return twin


def _window(sync: pe.Sync, forward: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    rank, world = me()
    for x in (mine := _data(world)[rank]):
        with sync.accumulate(last=x is mine[-1]):
            sync.backward(forward(x.to(dtype)).float().square().sum(), count=2)


def _close(model: nn.Module, twin: nn.Module) -> None:
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # At most 12 fp32 additions, the factor and the step; each rounds values up to 1 once.
        torch.testing.assert_close(p.double(), q, rtol=0, atol=20 * 2**-24)


@pytest.mark.parametrize(
    ("kind", "world", "name", "max_norm", "norm_type"),
    [
        ("own", 1, "sgd fused", 1e9, math.inf),
        ("own", 3, "sgd", 0.05, math.inf),
        ("own-native", 2, "adamw fused", 0.05, "inf"),
        ("own-exact", 2, "sgd fused", 0.05, math.inf),
        ("attach", 3, "sgd", 0.05, math.inf),
    ],
)
@on_ranks()
def test_an_inf_norm_clips_as_torch_clips_one_big_batch(kind, name, max_norm, norm_type):
    clip_and_step(kind, OPTIMIZERS[name], max_norm, norm_type=norm_type)


@pytest.mark.parametrize("name, first", [("sgd", False), ("adamw fused", True)])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_values_are_clipped_as_torch_clips_one_big_batch(kind, name, first):
    model, twin = _model(), _twin(me()[1])
    sync, forward = engine(kind, model, accumulate=3)
    records = records_of(sync)
    if first:
        sync.scaler = pe.GradScaler("cpu", init_scale=1024.0)
    _window(sync, forward)
    whole = nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    if first:
        sync.clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    sync.clip_grad_value_(0.02)
    nn.utils.clip_grad_value_(twin.parameters(), 0.02)
    assert max(p.grad.abs().max().item() for p in model.parameters()) == torch.tensor(0.02).item()
    clipped = nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    assert sync.grad_norm().item() == pytest.approx(clipped.item(), rel=1e-6)
    sync.clip_grad_norm_(0.05)  # of the clipped gradients
    nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    assert sync.step(OPTIMIZERS[name](model.parameters()))
    OPTIMIZERS[name](twin.parameters()).step()
    _close(model, twin)
    assert records[0].grad_norm == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_narrow_gradients_are_clipped_in_their_type(kind):
    model = _model(torch.bfloat16)
    sync, forward = engine(kind, model, accumulate=3)
    _window(sync, forward, torch.bfloat16)
    norm = sync.clip_grad_norm_(1e9, math.inf)
    sync.unscale_()
    assert norm.item() == max(p.grad.abs().max().item() for p in model.parameters())
    sync.clip_grad_value_(0.01)
    limit = torch.tensor(0.01, dtype=torch.bfloat16)
    assert all(p.grad.dtype == torch.bfloat16 and (p.grad.abs() <= limit).all() for p in model.parameters())
    assert sync.step(torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_parameters_without_a_gradient_or_without_elements_do_not_matter():
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(0, 2), nn.Linear(3, 1)])
    model[1].requires_grad_(False)
    sync = pe.GradSync(model)
    with sync.accumulate():
        sync.backward(model[0](torch.full((1, 3), 4.0)).sum() + model[2](torch.ones(1, 0)).sum())
    assert sync.clip_grad_norm_(2.0, float("inf")).item() == 4.0
    sync.clip_grad_value_(1.0)
    assert sync.grad_norm().item() == pytest.approx(math.sqrt(3 + 0.25 + 2 * 0.25), rel=1e-5)
    assert model[3].weight.grad is None and model[1].weight.grad is None


@pytest.mark.parametrize("norm_type, value", [(2.0, math.nan), (math.inf, math.inf), (math.inf, math.nan)])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_on_every_rank_alike(kind, norm_type, value):
    rank, world = me()
    model = nn.Linear(2, 1)
    sync, forward = engine(kind, model, accumulate=1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    bad = value if rank == world - 1 else 1.0
    with sync.accumulate():
        sync.backward(Inject.apply(forward(torch.ones(1, 2)), bad).sum())
    assert not math.isfinite(sync.clip_grad_norm_(1.0, norm_type).item())
    with pytest.raises(RuntimeError, match="error_if_nonfinite is set") as error:
        sync.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
    sync.clip_grad_value_(1.0)  # makes inf finite, but the step is still skipped
    assert not sync.step(optimizer)
    assert all(map(torch.equal, model.parameters(), before)) and not optimizer.state
    with sync.accumulate():
        sync.backward(forward(torch.ones(1, 2)).sum())
    assert sync.clip_grad_norm_(1e9, norm_type, error_if_nonfinite=True).item() > 0
    assert sync.step(optimizer)
    assert "weight" in str(error.value) and f"norm of order {norm_type:g}" in str(error.value)
    assert_alike(str(error.value))


WRONG = {
    "norm type 1": (
        ValueError,
        "norm_type=1: expected 2.0 or inf; for another norm call torch.nn.utils.clip_grad_norm_",
        (1.0, 1),
    ),
    "norm type nan": (ValueError, "norm_type=nan: expected 2.0 or inf", (1.0, math.nan)),
    "norm type text": (TypeError, "norm_type='fro' is a str: expected 2.0 or inf", (1.0, "fro")),
    "norm type bool": (TypeError, "norm_type=True is a bool", (1.0, True)),
    "max norm nan": (ValueError, "max_norm=nan: expected a non-negative number", (math.nan,)),
    "max norm nan tensor": (ValueError, "max_norm=nan: expected a non", (torch.tensor(math.nan),)),
    "max norm negative tensor": (ValueError, "max_norm=-1.0: expected a non", (torch.tensor([-1.0]),)),
    "max norm none": (TypeError, "max_norm=None is a NoneType", (None,)),
    "max norm tensor": (TypeError, "max_norm=tensor([1., 1.]) is a Tensor", (torch.ones(2),)),
    "parameters": (TypeError, "leave the parameters out, as in sync.clip_grad", ([torch.ones(1)], 1.0)),
    "value parameters": (
        TypeError,
        "leave the parameters out, as in sync.clip_grad_value_(1.0): the engine clips its own",
        ([torch.ones(1)], 1.0),
    ),
    "value negative": (ValueError, "clip_value=-1.0: expected a non-negative number", (-1.0,)),
    "value nan": (ValueError, "clip_value=nan: expected a non-negative number", (math.nan,)),
    "value text": (TypeError, "clip_value='1' is a str: expected a non-negative number", ("1",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named_and_changes_nothing(case):
    error, message, arguments = WRONG[case]
    model = nn.Linear(2, 1)
    model.load_state_dict({name: torch.zeros_like(p) for name, p in model.named_parameters()})
    sync = pe.GradSync(model)
    clip = sync.clip_grad_value_ if case.startswith("value") else sync.clip_grad_norm_
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(error) as caught:
        clip(*arguments)
    assert str(caught.value).startswith(message)
    assert sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert all((p == -1).all() for p in model.parameters())  # nothing was half-clipped


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_window_without_any_gradient_clips_nothing(kind):
    model = _model()
    sync, _ = engine(kind, model, accumulate=1)
    with sync.accumulate(), sync.micro_batch(count=1):
        pass
    sync.clip_grad_norm_(1.0)
    sync.clip_grad_value_(1.0)
    sync.step(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("clip", ["parameter", "value", "norm"])
@on_ranks(2)
def test_what_one_optimizer_has_left_may_be_clipped_and_kept(clip):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    sync = pe.GradSync(model, accumulate=1)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    for k in range(2):
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 2)).sum())
        sync.step(first)
        if clip == "value":
            sync.clip_grad_value_(0.01)
        else:
            sync.clip_grad_norm_(0.01, per="parameter" if clip == "parameter" else None)
        if k == 1:
            sync.step(second)


@on_ranks(2)
def test_the_record_has_the_norm_of_the_windows_end_whatever_was_clipped_since():
    model = nn.Linear(2, 1, bias=False)
    sync = pe.GradSync(model, accumulate=1)
    records = records_of(sync)
    with sync.accumulate():
        sync.backward(model(torch.full((1, 2), 3.0)).sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert float(sync.grad_norm()) == pytest.approx(1.0, rel=1e-5)
    sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert records[0].grad_norm == pytest.approx(math.sqrt(18))


@on_ranks(2)
def test_the_norm_says_where_a_step_is_skipped_that_the_caller_makes():
    """A window with a count of 0 has zero gradients, with which AdamW would still decay the weights."""
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    with sync.accumulate():
        sync.backward(0 * model(torch.ones(1, 2)).sum(), count=0)
    sync.unscale_()
    assert not sync.grad_norm().isfinite()


def _halve_local_tensors(model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.to_local().mul_(0.5)


def _replace(model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


@pytest.mark.parametrize("edit", [_halve_local_tensors, _replace])
@on_ranks(2)
def test_a_replicated_models_norm_follows_an_edit_on_one_rank_that_asks(edit):
    sync, model = sharded("replicate", accumulate=1)
    with sync.accumulate():
        sync.backward(loss_of(model, batch(1)))
    half = pytest.approx(sync.grad_norm().item() / 2, rel=1e-12)
    edit(model)
    if me()[0] == 0:
        assert sync.grad_norm().item() == half
    assert sync.clip_grad_norm_(math.inf).item() == half
    assert sync.grad_norm().item() == half
    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("kind", ["flat", "replicate"])
@pytest.mark.parametrize("how", ["clip", "norms"])
@on_ranks(2)
def test_norms_by_name_are_asked_for_first_in_a_window_with_inf(kind, how):
    sync, forward = sharded(kind, accumulate=1)
    with sync.accumulate():
        sync.backward(Inject.apply(forward(torch.ones(2, 5)).sum(), math.inf))
    if how == "clip":
        sync.clip_grad_norm_(1.0, per="parameter")
    else:
        assert not all(norm.isfinite() for norm in sync.grad_norms().values())
    assert not sync.step(torch.optim.SGD(forward.parameters(), lr=0.1))
