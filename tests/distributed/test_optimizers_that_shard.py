"""Optimizers that themselves reduce gradients, step a shard and gather parameters, used with engines.

`SlicedAdamW` and `OwnedMuon` are written like the optimizers of nanochat. They divide a sum, because gloo
has no `ReduceOp.AVG`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import assert_alike, assert_same, error_of, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


class Sharding(torch.optim.Optimizer):
    """An optimizer that shards its own states.

    Args:
        reduces: whether `step` averages the gradients over all ranks; an engine has done so already.
    """

    lr: float

    def __init__(self, params: Any, *, reduces: bool) -> None:
        self.reduces = reduces
        super().__init__(params, {"lr": self.lr})


class SlicedAdamW(Sharding):
    """AdamW in which each rank steps its own rows of every parameter."""

    lr = 0.01

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, world = me()
        for group in self.param_groups:
            for param in group["params"]:
                rows = param.shape[0] // world
                grad = param.grad[rank * rows : (rank + 1) * rows]
                if self.reduces:
                    grad = torch.empty_like(grad)
                    dist.reduce_scatter_tensor(grad, param.grad.contiguous())
                    grad /= world
                shard = param[rank * rows : (rank + 1) * rows]
                state = self.state[param]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(shard), "square": torch.zeros_like(shard)}
                state["step"] += 1
                state["mean"].lerp_(grad, 0.1)
                state["square"].lerp_(grad.square(), 0.05)
                mean = state["mean"] / (1 - 0.9 ** state["step"])
                scale = (state["square"] / (1 - 0.95 ** state["step"])).sqrt() + 1e-8
                shard.addcdiv_(mean, scale, value=-group["lr"])
                dist.all_gather_into_tensor(param, shard.clone())


class OwnedMuon(Sharding):
    """Muon in which one rank per matrix computes the orthogonalized update and broadcasts the result."""

    lr = 0.05

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, world = me()
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                owner, grad = place % world, param.grad
                if self.reduces:
                    dist.reduce(grad, owner)
                    grad = grad / world
                if rank == owner:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.lerp_(grad, 0.1)
                    left, _, right = torch.linalg.svd(momentum, full_matrices=False)
                    param.sub_(left @ right, alpha=group["lr"])
                dist.broadcast(param, owner)


OPTIMIZERS = {"SlicedAdamW": SlicedAdamW, "OwnedMuon": OwnedMuon}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12, bias=False), nn.Tanh(), nn.Linear(12, 12, bias=False))


def _batches() -> list[Tensor]:
    """Return this rank's micro-batches: three windows of two."""
    generator = torch.Generator().manual_seed(me()[0])
    return list(torch.randn(6, 3, 5, generator=generator))


def _trained(owner: str, name: str, *, reduces: bool, is_skipped: bool = False) -> dict[str, Tensor | None]:
    model = _model()
    forward: nn.Module = model
    if owner == "attach":
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sync: pe.Sync = pe.attach(forward, accumulate=2)
    else:
        sync = pe.GradSync(model, accumulate=2)
    optimizer = OPTIMIZERS[name](model.parameters(), reduces=reduces)
    stepped = []
    for number, window in enumerate(sync.windows(_batches())):
        for x in window:
            bad = torch.inf if is_skipped and number == 1 and me()[0] == 0 else 1.0
            sync.backward(forward(x).square().sum() * bad, count=len(x))
        sync.clip_grad_norm_(1.0)
        stepped.append(bool(sync.step(optimizer)))
    assert stepped == [True, not is_skipped, True]
    sync.close()
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert_alike({name: param.tolist() for name, param in params.items()})
    return params


@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("owner", ["GradSync", "attach"])
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
@on_ranks()
def test_what_an_optimizer_averages_again_stays_the_same(world, owner, name, is_skipped):
    """The average of equal gradients is exact on 1, 2 and 4 ranks, and rounded on 3 ranks."""
    want = _trained(owner, name, reduces=False, is_skipped=is_skipped)
    got = _trained(owner, name, reduces=True, is_skipped=is_skipped)
    if world == 3:
        # A gradient is rounded twice, by 2**-23 in total. Adam's quotient and Muon's factors of a matrix of
        # this size amplify that at most 1000 times, in three steps of at most 0.05.
        torch.testing.assert_close(got, want, rtol=0, atol=3 * 0.05 * 1000 * 2**-23)
    else:
        assert_same(got, want)


@on_ranks(2)
def test_the_oracle_is_a_plain_loop_with_the_optimizer_s_own_reduction():
    """Micro-batches have equal sizes, so the mean is that of a loop without an engine over `loss / 2`."""
    model, batches = _model(), _batches()
    optimizer = SlicedAdamW(model.parameters(), reduces=True)
    for first in range(0, 6, 2):
        for x in batches[first : first + 2]:
            (model(x).square().sum() / 3 / 2).backward()
        for param in model.parameters():  # clip the mean over ranks, like sync.clip_grad_norm_
            dist.all_reduce(param.grad)
            param.grad /= 2
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    got = _trained("GradSync", "SlicedAdamW", reduces=False)
    # Gradients differ by some roundings of 2**-24, amplified 1000 times by Adam, in steps of 0.01.
    torch.testing.assert_close(got, dict(model.named_parameters()), rtol=0, atol=3 * 0.01 * 1000 * 2**-22)


@on_ranks(2)
def test_optimizers_with_other_parameters_on_each_rank_are_refused():
    model = _model()
    sync = pe.GradSync(model, accumulate=1)
    mine = [param for place, param in enumerate(model.parameters()) if place % 2 == me()[0]]
    optimizer = torch.optim.AdamW(mine, lr=0.1)

    def trained() -> None:
        for window in sync.windows(_batches()[:2]):
            for x in window:
                sync.backward(model(x).square().sum())
            sync.step(optimizer)

    assert "ranks have used the last window differently: rank 0: AdamW(" in error_of(trained)


@on_ranks(2)
def test_optimizers_with_other_parameters_on_each_rank_step_behind_unscale():
    model, twin = _model(), _model()
    sync = pe.GradSync(model, accumulate=1)
    params = list(model.parameters())
    mine = [param for place, param in enumerate(params) if place % 2 == me()[0]]
    optimizer = torch.optim.AdamW(mine, lr=0.1)
    for window in sync.windows(_batches()[:2]):
        for x in window:
            sync.backward(model(x).square().sum(), count=len(x))
        sync.unscale_()
        if torch.isfinite(sync.grad_norm()):
            optimizer.step()
            for place, param in enumerate(params):
                dist.broadcast(param.data, place % 2)
        model.zero_grad()  # of all parameters, or those left are added to the next window
    sync.close()
    sync = pe.GradSync(twin, accumulate=1)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for window in sync.windows(_batches()[:2]):
        for x in window:
            sync.backward(twin(x).square().sum(), count=len(x))
        sync.step(plain)
    assert_same(dict(model.named_parameters()), dict(twin.named_parameters()))
