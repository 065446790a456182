"""`.grad` is the window's mean wherever user code can read it, and the optimizer uses this mean."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cases import OPTIMIZERS, Integers, assert_same, engine, grads, me, records_of, window_of_integers
from ranks import on_ranks
from sharded_cases import batch, loss_of, right_grads, sharded, whole_grads
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor

import pyengine as pe


def _clip_and_step(
    sync: pe.Sync,
    optimizer: torch.optim.Optimizer,
    mean: dict[str, Tensor | None],
    look: Callable[[], dict[str, Tensor | None]],
) -> None:
    """Clip and step; check that gradients, which `look` copies, are the mean and then the clipped mean."""
    assert_same(look(), mean)
    norm = sync.clip_grad_norm_(1e9)
    assert_same(look(), mean)
    whole = torch.stack([g.double().norm() for g in mean.values() if g is not None]).norm()
    assert norm.item() == pytest.approx(whole.item(), rel=1e-12)
    factor = (norm / 2 / (norm + 1e-6)).float()
    sync.clip_grad_norm_(norm / 2)
    clipped = {name: None if g is None else (g.float() * factor).to(g.dtype) for name, g in mean.items()}
    assert_same(look(), clipped)
    assert sync.step(optimizer)
    assert_same(look(), clipped)  # they stay until the next window begins


@pytest.mark.parametrize(
    ("world", "kind", "dtype", "wire", "is_scaled"),
    [
        (4, "own", torch.float32, torch.float32, False),
        (2, "own", torch.bfloat16, torch.bfloat16, True),
        (1, "own-native", torch.float32, torch.float32, True),
        (2, "own-native", torch.bfloat16, torch.bfloat16, False),
        (2, "own-exact", torch.bfloat16, torch.float32, True),
        (3, "attach", torch.bfloat16, torch.float32, False),
        (2, "attach-view", torch.float32, torch.bfloat16, False),
        (3, "attach-view", torch.float32, torch.float32, True),
    ],
    ids=str,
)
@on_ranks()
def test_grad_is_the_mean_and_behind_clipping_the_clipped_mean(kind, dtype, wire, is_scaled):
    model = Integers(dtype)
    sync, forward = engine(kind, model, accumulate=2, wire=wire)
    if is_scaled:
        sync.scaler = pe.GradScaler("cpu", init_scale=2.0**7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(3):
        mean = window_of_integers(sync, forward, model, number)
        _clip_and_step(sync, optimizer, mean, lambda: grads(model))


@pytest.mark.parametrize(
    ("kind", "world", "accumulator", "is_scaled"),
    [
        ("flat", 1, "fp32", True),
        ("nested", 2, "fp32", False),
        ("nested", 2, "exact", True),
        ("replicate", 3, "fp32", False),
        ("hsdp", 4, "exact", False),
    ],
)
@on_ranks()
def test_grad_of_a_sharded_model_is_the_mean(kind, accumulator, is_scaled):
    rank, world = me()
    sync, model = sharded(kind, accumulate=2, accumulator=accumulator)
    if is_scaled:
        sync.scaler = pe.GradScaler("cpu", init_scale=2.0**7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(2):
        for k in range(2):
            with sync.accumulate():
                sync.backward(loss_of(model, batch(100 * number + 10 * rank + k)), count=3)
        batches = [batch(100 * number + 10 * r + k) for r in range(world) for k in range(2)]
        _clip_and_step(sync, optimizer, right_grads(batches, 6 * world), lambda: whole_grads(model))


# ---- gradients that the user modifies ----


def _replace(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.nan_to_num(param.grad) + 0.25


def _exchange_data(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad.data = param.grad.data * 3


def _clip_as_torch(params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 0.5)


def _transpose(params: list[nn.Parameter]) -> None:
    """Replace a gradient by one with strides that the native core cannot address."""
    params[0].grad = params[0].grad.t().contiguous().t()


def _space_out(params: list[nn.Parameter]) -> None:
    """Replace gradients by strided views that have other elements between their own."""
    for param in params:
        param.grad = torch.stack([param.grad, -param.grad], -1)[..., 0]


EDITS = (_replace, _exchange_data, _clip_as_torch, _transpose, _space_out)
OWNERS = (("own", "sgd fused"), ("own-exact", "sgd"), ("attach-view", "adamw fused"))


@pytest.mark.parametrize(
    ("kind", "name", "edit", "clips"),
    [
        (*OWNERS[(number + clips) % 3], edit, bool(clips))
        for number, edit in enumerate(EDITS)
        for clips in (0, 1)
    ],
)
@on_ranks(2)
def test_what_the_user_makes_of_gradients_is_what_the_optimizer_uses(kind, edit, name, clips):
    model, twin = Integers(torch.float32), Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    ours, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    for number in range(2):
        for key, mean in window_of_integers(sync, forward, model, number).items():
            twin.get_parameter(key).grad = mean
        edit(list(model.parameters()))
        edit(list(twin.parameters()))
        if clips:
            norm = sync.clip_grad_norm_(0.3)
            want = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
            assert norm.item() == pytest.approx(want.item(), rel=1e-6)
        assert sync.step(ours)
        plain.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            # The clipping factor may differ by one rounding, and so may a gradient.
            torch.testing.assert_close(p, q, rtol=2**-22 if clips else 0, atol=2**-22 if clips else 0)


def _step(sync: pe.Sync, optimizer: torch.optim.Optimizer) -> None:
    sync.step(optimizer)


def _step_clipped(sync: pe.Sync, optimizer: torch.optim.Optimizer) -> None:
    sync.step(optimizer, max_norm=0.5)


def _clip(sync: pe.Sync, optimizer: torch.optim.Optimizer) -> None:
    sync.clip_grad_norm_(0.5)
    sync.step(optimizer)


def _clip_largest(sync: pe.Sync, optimizer: torch.optim.Optimizer) -> None:
    sync.clip_grad_norm_(0.5, math.inf)
    sync.step(optimizer)


def _trained(
    kind: str, use: Callable[..., None], *, name: str = "sgd", is_sparse: bool = False
) -> tuple[list[Tensor], list[float | None]]:
    """Train two windows, optionally with sparse gradients; return norms, parameters, and recorded norms."""
    model, found = Integers(torch.float32), []
    sync, forward = engine(kind, model, accumulate=2)
    records, optimizer = records_of(sync), OPTIMIZERS[name](model.parameters())
    for number in range(2):
        window_of_integers(sync, forward, model, number)
        for param in model.parameters() if is_sparse else ():
            param.grad = param.grad.to_sparse()
        use(sync, optimizer)
        found.append(sync.grad_norm())
    sync.close()
    return [*found, *model.parameters()], [record.grad_norm for record in records]


@pytest.mark.parametrize("use", [_step, _step_clipped, _clip, _clip_largest])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_sparse_gradient_that_the_user_sets_is_measured_and_used(kind, use):
    (dense, _), (sparse, _) = (_trained(kind, use, is_sparse=is_sparse) for is_sparse in (False, True))
    assert all(map(torch.equal, dense, sparse))


@pytest.mark.parametrize("use", [_step_clipped, _clip])
def test_a_gradient_without_elements_of_its_own_is_named(use):
    model = nn.Linear(3, 2)
    sync, optimizer = pe.GradSync(model, accumulate=1), torch.optim.SGD(model.parameters(), lr=0.5)
    sync.backward(model(torch.ones(2, 3)).sum(), count=2)
    plain = model.bias.grad
    model.bias.grad = TwoTensor(plain, plain)
    with pytest.raises(
        ValueError, match=r"the \.grad of 'bias' is a TwoTensor.*a plain tensor of 2 elements"
    ):
        use(sync, optimizer)
    model.bias.grad = plain
    use(sync, optimizer)
    sync.close()


# ---- how an optimizer is stepped ----


class _Forwards:
    """A wrapper like Lightning Fabric's: attribute reads reach the optimizer, attribute writes do not."""

    def __init__(self, model: nn.Module) -> None:
        self._optimizer = _fused(model)

    def __getattr__(self, name: str) -> object:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        self._optimizer.step()


def _one_step(make: Callable[[nn.Module], object], *, is_bad: bool = False) -> tuple[bool, Tensor]:
    """Train a window whose mean is 1; return whether it stepped, and how far the parameters went."""
    model = nn.Linear(3, 2, bias=False)
    sync = pe.GradSync(model, accumulate=1)
    before = model.weight.detach().clone()
    sync.backward(model(torch.ones(10, 3)).sum() * (torch.nan if is_bad else 1), count=10)
    stepped = sync.step(make(model))
    return bool(stepped), before - model.weight.detach()


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, fused=True)


class _Clips(torch.optim.SGD):
    """An optimizer that itself clips gradients before it calls torch's step."""

    def step(self, closure: object = None) -> None:
        nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], 0.5)
        super().step()


def _hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = _fused(model)
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.5)
    )
    return optimizer


def _partly_fused(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0, fused=True)
    optimizer.param_groups[0]["fused"] = False  # as in a checkpoint that was loaded
    return optimizer


def _scaled_by_the_user(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = _fused(model)
    optimizer.grad_scale = torch.tensor(4.0)
    return optimizer


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (_Forwards, 1.0),
        (lambda model: _Clips(model.parameters(), lr=1.0, fused=True), 0.5),
        (_hooked, 0.5),
        (_partly_fused, 1.0),
        (_scaled_by_the_user, 0.25),
    ],
    ids=["wrapper", "subclass", "pre-hook", "partly fused", "grad_scale"],
)
def test_an_optimizer_that_is_not_torchs_own_fused_one_sees_the_mean(make, want):
    stepped, went = _one_step(make)
    assert stepped
    torch.testing.assert_close(went, torch.full((2, 3), want), rtol=0, atol=1e-6)  # AdamW's eps of 1e-8
    stepped, went = _one_step(make, is_bad=True)
    assert not stepped
    assert not went.any()


def test_a_global_hook_sees_the_mean():
    seen = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0].grad.clone())
    )
    try:
        _one_step(_fused)
    finally:
        handle.remove()
    assert torch.equal(seen[0], torch.ones(2, 3))


@pytest.mark.parametrize("fused", [False, True])
def test_a_second_step_uses_the_same_mean(fused):
    model = nn.Linear(3, 2, bias=False)
    sync = pe.GradSync(model, accumulate=1)
    before = model.weight.detach().clone()
    sync.backward(model(torch.ones(10, 3)).sum(), count=10)
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0, fused=fused) for _ in range(2))
    sync.step(first)
    sync.unscale_()
    sync.step(second)
    torch.testing.assert_close(before - model.weight, torch.full((2, 3), 2.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_step_clips_and_steps_in_one_call(kind, name):
    at_once, norms = _trained(kind, _step_clipped, name=name)
    clipped, same = _trained(kind, _clip, name=name)
    assert all(map(torch.equal, at_once, clipped))
    assert norms == same and min(norms) > 0.5  # before clipping
    assert [norm.item() for norm in at_once[:2]] == pytest.approx([0.5] * 2, rel=1e-5)
