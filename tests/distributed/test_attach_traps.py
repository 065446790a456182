"""DDP, autograd and hooks with `attach`: gradients are those of one big batch, or an error is raised."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from cases import Inject, assert_same, error_of, grads, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import pyengine as pe

ACCUMULATE, WINDOWS = 2, 3
SUMS = {
    "fp32": ("fp32", torch.float32),
    "narrow": ("fp32", torch.bfloat16),
    "narrow, native": ("native", torch.bfloat16),
    "exact": ("exact", torch.float32),
}
DDPS = {"plain": {}, "view": {"gradient_as_bucket_view": True}, "unused": {"find_unused_parameters": True}}


class NoGradient(torch.autograd.Function):
    """Identity that also takes a weight, and returns a gradient for it only if `brings` is set."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, brings: bool) -> Tensor:
        ctx.brings, ctx.shape = brings, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad, grad.new_ones(ctx.shape) if ctx.brings else None, None


class Layers(nn.Module):
    """Layers that are always used, used in some micro-batches, without a gradient, and never used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("always", "some", "none", "never"):
            self.register_parameter(name, nn.Parameter(torch.ones(5, dtype=dtype)))

    def forward(self, x: Tensor, some: bool, brings: bool) -> Tensor:
        """Return a sum whose gradient is `x` for every used layer."""
        x = x.to(self.always.dtype)
        total = (self.always * x).sum() + ((self.some * x).sum() if some else 0)
        return NoGradient.apply(total, self.none, brings)


def _attach(model: nn.Module, ddp: str, accumulator: str, **options: object):
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5, **DDPS[ddp])
    return pe.attach(wrapped, accumulate=ACCUMULATE, accumulator=accumulator, **options), wrapped


def _x(rank: int, window: int, place: int) -> Tensor:
    return torch.arange(5.0) + rank + 2 * window + place


def _mean(dtype: torch.dtype, values: list[Tensor], count: int) -> Tensor | None:
    inverse = torch.tensor(1 / count, dtype=torch.float64).float()
    return sum(v.double() for v in values).float().mul(inverse).to(dtype) if values else None


@pytest.mark.parametrize(
    ("world", "ddp", "sums", "brings"),
    [
        (1, "plain", "fp32", [True, False]),
        (1, "view", "exact", [True, True]),
        (2, "view", "narrow", [False, False]),
        (2, "plain", "exact", [True, False]),
        (2, "plain", "narrow", [True, True]),
        (3, "unused", "exact", [False, True]),
        (3, "unused", "fp32", [True, True]),
    ],
)
@on_ranks()
def test_hooks_see_only_real_gradients_and_what_nobody_used_or_a_function_leaves_out_has_none(
    ddp, sums, brings
):
    """`some` is used only in the first micro-batch; hooks add 1 to the gradients of `always` and `some`."""
    rank, world = me()
    accumulator, dtype = SUMS[sums]
    model = Layers(dtype)
    calls = []
    sync, wrapped = _attach(model, ddp, accumulator)
    for param in (model.always, model.some, model.never):  # a hook of `none` may get None
        param.register_hook(lambda grad: grad + 1)
    model.some.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    data = [(window, place) for window in range(WINDOWS) for place in range(ACCUMULATE)]
    if rank == world - 1 and world > 1:
        data = data[:3]  # one micro-batch in the second window, none in the last
    for number, window in enumerate(sync.windows(data)):
        for where in window:
            place = where[1]
            sync.backward(wrapped(_x(rank, *where), place == 0, brings[place]))
        members = [(r, number, k) for r in range(world) for k in range(ACCUMULATE)]
        if world > 1:
            left = 3 - ACCUMULATE * number
            members = [(r, w, k) for r, w, k in members if r < world - 1 or k < left]
        sync.unscale_()
        values = {
            "always": [_x(*m) + 1 for m in members],
            "some": [_x(*m) + 1 for m in members if m[2] == 0],
            "none": [torch.ones(5) for m in members if brings[m[2]]],
            "never": [],
        }
        assert_same(grads(model), {name: _mean(dtype, mine, len(members)) for name, mine in values.items()})
        before = model.never.detach().clone()
        assert sync.step(optimizer)
        assert torch.equal(before, model.never)
    assert len(calls) == sum(place == 0 for _, place in data)


@pytest.mark.parametrize(
    ("ddp", "sums", "at"),
    [
        ("plain", "fp32", 0),
        ("plain", "exact", 0),
        ("view", "narrow", 1),
        ("unused", "exact", 1),
        ("plain", "narrow, native", 0),
        ("unused", "fp32", 1),
    ],
)
@on_ranks(2)
def test_a_backward_that_breaks_under_a_finite_loss_is_named_by_raise(ddp, sums, at):
    """The gradient of rank 1's micro-batch `at` is nan."""
    rank, _ = me()
    accumulator, dtype = SUMS[sums]
    model = nn.Sequential(nn.Linear(3, 2, dtype=dtype), nn.Linear(2, 1, dtype=dtype))
    sync, wrapped = _attach(model, ddp, accumulator, nonfinite="raise")
    with pytest.raises(FloatingPointError, match=f"from rank 1, micro-batch {at}"):
        for place in range(ACCUMULATE):
            with sync.accumulate():
                loss = wrapped(torch.ones(1, 3, dtype=dtype)).float().sum()
                sync.backward(Inject.apply(loss, math.nan if (rank, place) == (1, at) else 1.0))


@pytest.mark.parametrize(
    "what, needle",
    [
        ("delayed", "made with delay_all_reduce_named_params"),
        ("hook", "ddp_model has a communication hook"),
        ("hook inside", "a DistributedDataParallel inside ddp_model has a communication hook"),
        ("hook of buffers", "ddp_model has a hook for its buffers"),
        ("mixed", "ddp_model was made with mixed_precision"),
        ("another group", "a DistributedDataParallel inside ddp_model sums over ranks"),
        ("sharded", "TypeError: ddp_model is a FSDPLinear: FSDP1"),
        ("join", "RuntimeError: leave ddp_model.join() out"),
        ("bare", "TypeError: ddp_model is a Linear: expected a DistributedDataParallel"),
    ],
)
@on_ranks(2)
def test_what_would_go_past_the_engine_is_refused_by_name(what, needle):
    rank, _ = me()
    inner: nn.Module = nn.Linear(2, 1)
    if what in ("hook inside", "another group"):
        alone = [dist.new_group([each]) for each in range(2)][rank]
        inner = DistributedDataParallel(inner, process_group=alone if what == "another group" else None)
    model = nn.Sequential(nn.Embedding(2, 2), inner)
    options: dict[str, object] = {}
    if what == "delayed":
        options = {
            "delay_all_reduce_named_params": [("0.weight", model[0].weight)],
            "param_to_hook_all_reduce": inner.weight,
        }
    if what == "mixed":
        options = {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}
    ddp: nn.Module = DistributedDataParallel(model, **options)
    if what.startswith("hook"):
        hooked = inner if what == "hook inside" else ddp
        if what == "hook of buffers":
            ddp._register_buffer_comm_hook(None, lambda *_: None)
        else:
            hooked.register_comm_hook(pe.HookState(wire=pe.wire.BF16()), pe.comm_hook)
    if what == "bare":
        ddp = nn.Linear(2, 2)
    if what == "sharded":
        ddp = type("FSDPLinear", (nn.Linear,), {})(2, 2)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        sync = pe.attach(ddp, accumulate=1)
        if what == "join":
            with ddp.join(), sync.accumulate():
                pass
    assert needle in f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize("how", ["hook", "a larger one", "no_sync"])
@on_ranks(2)
def test_a_forward_through_another_ddp_that_would_reduce_is_refused(how):
    model = nn.Linear(2, 1, bias=False)
    sync = pe.attach(DistributedDataParallel(model), accumulate=1)
    second = DistributedDataParallel(nn.Sequential(model) if how == "a larger one" else model)
    if how == "hook":
        second.register_comm_hook(pe.HookState(), pe.comm_hook)
    copied = copy.deepcopy(model)
    assert pickle.dumps(model)

    def train() -> None:
        copied(torch.ones(1, 2))
        with torch.no_grad():
            second(torch.ones(1, 2))
        with sync.accumulate(), second.no_sync() if how == "no_sync" else contextlib.nullcontext():
            sync.backward(second(torch.ones(1, 2)).sum())
        sync.close()
        second(torch.ones(1, 2)).sum().backward()

    message = "no error" if how == "no_sync" else "call the ddp_model that was passed to pe.attach"
    assert error_of(train).startswith(message)
