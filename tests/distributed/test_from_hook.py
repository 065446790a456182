"""DDP's communication hooks as wires: the bits of stock DDP with the same hook, also with windows."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Inject, assert_alike, engine, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}
KINDS = ("own", "attach", "attach-view")


def _state(name: str) -> Any:
    if name != "powersgd":
        return None
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )


def _wire(name: str) -> pe.wire.FromHook:
    return pe.wire.FromHook(HOOKS[name], _state(name))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 12))


def _data(window: int, rank: int, items: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * window + rank)
    return torch.randn(items, 16, generator=generator)


def _stock(name: str, windows: int) -> list[Tensor]:
    """Return the gradients of stock DDP with the hook, in one bucket, which PowerSGD over gloo requires."""
    ddp = DistributedDataParallel(_model())

    def unnamed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return HOOKS[name](state, bucket)  # without NCCL, DDP refuses the bf16 hook by its name

    ddp.register_comm_hook(_state(name), unnamed)
    found = []
    for window in range(windows):
        ddp.zero_grad()
        ddp(_data(window, me()[0])).square().sum().backward()
        found += [param.grad.clone() for param in ddp.module.parameters()]
    return found


def _engine(kind: str, model: nn.Module, wire: pe.wire.Wire) -> tuple[pe.Sync, nn.Module]:
    """Create an engine with one bucket; return it and the module to call."""
    if kind == "own":
        return pe.GradSync(model, wire=wire), model
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=kind == "attach-view")
    return pe.attach(ddp, wire=wire), ddp


def _ours(kind: str, name: str, windows: int) -> list[Tensor]:
    model = _model()
    sync, forward = _engine(kind, model, _wire(name))
    found = []
    for window in range(windows):
        with sync.accumulate():
            sync.backward(forward(_data(window, me()[0])).square().sum(), count=1)
        sync.unscale_()
        found += [param.grad.clone() for param in model.parameters()]
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    sync.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_gradients_have_the_bits_of_stock_ddp_under_the_hook():
    """GradSync's buckets have a different layout, so PowerSGD starts from different columns."""
    for name in HOOKS:
        stock = _stock(name, 3)
        for kind in KINDS:
            ours = _ours(kind, name, 3)
            if (kind, name) != ("own", "powersgd"):
                assert all(map(torch.equal, ours, stock)), (name, kind)
            assert_alike([grad.tolist() for grad in ours])


@pytest.mark.parametrize("name", ["bf16", "powersgd"])
@pytest.mark.parametrize(("kind", "world"), [("own", 2), ("attach", 3)])
@on_ranks()
def test_windows_of_unequal_counts_are_one_big_batch(kind, name):
    rank, world = me()
    wire, model = _wire(name), _model()
    if name == "powersgd":
        wire.state.matrix_approximation_rank = 16
    sync, forward = engine(kind, model, accumulate=2, wire=wire)
    for window in range(3):
        for k in range(2):
            with sync.accumulate():
                data = _data(10 * window + k, rank, items=1 + rank + k)
                sync.backward(forward(data).square().sum(), count=1 + rank + k)
        sync.unscale_()
        members = [(r, k) for r in range(world) for k in range(2)]
        batch = torch.cat([_data(10 * window + k, r, items=1 + r + k) for r, k in members]).double()
        twin = _model().double()
        (twin(batch).square().sum() / len(batch)).backward()
        for mine, param in zip(model.parameters(), twin.parameters(), strict=True):
            largest = float(param.grad.abs().max())
            unit = 2.0**-8 * 4 * world if name == "bf16" else 2.0**-12
            torch.testing.assert_close(mine.grad.double(), param.grad, rtol=0, atol=unit * largest)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@on_ranks(2)
def test_the_bare_hook_runs_buckets_one_after_the_other():
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=1e-5)
    ddp.register_comm_hook(pe.HookState(wire=_wire("powersgd")), pe.comm_hook)
    for _ in range(4):
        ddp.zero_grad()
        ddp(_data(0, 0)).square().sum().backward()  # the same data on every rank
    twin = _model()
    twin(_data(0, 0)).square().sum().backward()
    torch.testing.assert_close(ddp.module[2].bias.grad, twin[2].bias.grad, rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_window_with_nan_is_skipped_and_the_hooks_memory_stays_finite(kind):
    rank, _ = me()
    wire, model = _wire("powersgd"), _model()
    sync, forward = engine(kind, model, accumulate=1, wire=wire)
    stepped = []
    for window in range(5):
        with sync.accumulate():
            loss = forward(_data(window, rank)).square().sum()
            is_bad = window == 3 and rank == 1
            sync.backward(Inject.apply(loss, torch.nan if is_bad else 1.0), count=3)
        stepped.append(bool(sync.step(torch.optim.SGD(model.parameters(), lr=0.01))))
    assert stepped == [True, True, True, False, True]
    kept = wire.state.error_dict.values()
    assert kept and all(each.isfinite().all() for each in kept)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_what_a_hook_raises_is_reported(kind):
    def broken(state: Any, bucket: Any) -> Any:
        raise ArithmeticError("no such gradient")

    model = _model()
    sync, forward = engine(kind, model, accumulate=1, wire=pe.wire.FromHook(broken))
    with pytest.raises(Exception, match="no such gradient"):
        with sync.accumulate():
            sync.backward(forward(_data(0, 0)).sum(), count=1)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@on_ranks(3)
def test_a_hook_over_other_ranks_is_refused_on_every_rank():
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    with pytest.raises(ValueError) as error:
        pe.GradSync(nn.Linear(2, 2), wire=pe.wire.FromHook(HOOKS["allreduce"], pairs[me()[0] // 2]))
    assert "the hook averages over 2 ranks, but gradients are summed over 3" in str(error.value)


def test_wrong_arguments_are_named_and_bytes_are_not_known():
    with pytest.raises(TypeError, match="hook is a int: expected a DDP communication hook"):
        pe.wire.FromHook(3)
    with pytest.raises(ValueError, match="does not report the bytes .* for 10 elements over 2 ranks"):
        _wire("bf16").bytes_on_wire(10, 2)
    name = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook"
    assert repr(_wire("powersgd")) == f"FromHook({name}, state=a PowerSGDState)"


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_hook_gets_a_bucket_with_the_parameters_of_its_gradients(kind):
    model, seen = _model(), []

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        params = list(model.parameters())
        indices = [next(i for i, p in enumerate(params) if p is mine) for mine in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), sorted(indices)))
        shapes = [gradient.numel() for gradient in bucket.gradients()]
        assert shapes == [param.numel() for param in bucket.parameters()]
        return default_hooks.allreduce_hook(state, bucket)

    sync, forward = _engine(kind, model, pe.wire.FromHook(hook))
    with sync.accumulate():
        sync.backward(forward(_data(0, me()[0])).square().sum(), count=1)
    sync.unscale_()
    assert seen == [(0, True, [0, 1, 2, 3])]
