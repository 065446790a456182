"""The assertions of the peers' own tests, held by our engine: same models, same sequences, same comparisons.

Accelerate: `test_sync.py`, `test_optimizer.py`; torch: `distributed_test.py` (accumulate_gradients_no_sync,
ddp_hook_parity, uneven inputs); Lightning: zero_grad counts, manual-optimisation "already averaged".
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from cases import engine, me
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

KINDS = ("own", "attach", "attach-view")


class Regression(nn.Module):
    """Accelerate's RegressionModel: y = a x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x + self.b


def _regression_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(42)
    x = torch.randn(96, generator=generator)
    return x, 2 * x + 3 + 0.1 * torch.randn(96, generator=generator)


def _shard(step: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return this rank's micro-batch of a step and the gathered one."""
    rank, world = me()
    x, y = (values[step * 12 : step * 12 + 12] for values in _regression_data())
    size = 12 // world
    mine = slice(rank * size, rank * size + size)
    return (x[mine], y[mine]), (x, y)


def _close(model: nn.Module, reference: nn.Module) -> bool:
    return all(
        torch.allclose(p.grad, q.grad)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def _gradient_accumulation(kind: str) -> list[tuple[bool, bool]]:
    """test_gradient_accumulation: gradients are never zeroed; synced ones equal the big batch,
    others do not.
    """
    model, reference = Regression(), Regression()
    sync, forward = engine(kind, model, accumulate=2)
    seen = []
    for step in range(7):
        (x, y), (all_x, all_y) = _shard(step)
        window_is_short = step == 6
        mse_loss(reference(all_x), all_y).div(1 if window_is_short else 2).backward()
        with sync.accumulate(last=window_is_short):
            sync.backward(mse_loss(forward(x), y))
        if sync.is_sync_step:
            sync.unscale_()
        same = model.a.grad is not None and _close(model, reference)
        seen.append((sync.is_sync_step, same))
    return seen


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_gradient_accumulation_is_close_exactly_when_synced(ranks, kind, world):
    for seen in ranks(world).run(_gradient_accumulation, kind):
        assert [synced for synced, _ in seen] == [False, True, False, True, False, True, True]
        assert all(same == synced for synced, same in seen)


def _with_optimizer_and_scheduler(kind: str) -> list[bool]:
    """test_gradient_accumulation_with_opt_and_scheduler: learning rates equal exactly,
    gradients iff it stepped.
    """
    model, reference = Regression(), Regression()
    sync, forward = engine(kind, model, accumulate=2)

    def optimizers(net: nn.Module):
        adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
        return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: epoch**0.65)

    (adam, schedule), (other, other_schedule) = optimizers(model), optimizers(reference)
    wrapped = sync.wrap(adam, schedule)
    seen = []
    for step in range(7):
        (x, y), (all_x, all_y) = _shard(step)
        last = step == 6
        mse_loss(reference(all_x), all_y).div(1 if last else 2).backward()
        did_step = step % 2 == 1 or last
        if did_step:
            expected = [p.grad.clone() for p in reference.parameters()]
            other.step()
            other_schedule.step()
            other.zero_grad()
        with sync.accumulate(last=last):
            sync.backward(mse_loss(forward(x), y))
            if sync.is_sync_step:
                sync.unscale_()
                got = [p.grad.clone() for p in model.parameters()]
                assert all(torch.allclose(g, e, rtol=1e-5) for g, e in zip(got, expected, strict=True))
            wrapped.step()
            wrapped.zero_grad()
        assert adam.param_groups[0]["lr"] == other.param_groups[0]["lr"]
        seen.append(did_step)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_optimizer_and_scheduler_step_with_the_window(ranks, kind):
    ranks(2).run(_with_optimizer_and_scheduler, kind)


def _multiple_forwards(kind: str) -> list[bool]:
    """test_distributed_sync_multiple_fwd: three forwards, then three backwards; equal after the last only."""
    model, reference = Regression(), Regression()
    sync, forward = engine(kind, model, accumulate=3)
    for step in range(3):
        _, (all_x, all_y) = _shard(step)
        mse_loss(reference(all_x), all_y).div(3).backward()
    same = []
    for window in sync.windows([_shard(step)[0] for step in range(3)]):
        for number, loss in enumerate([mse_loss(forward(x), y) for x, y in window]):
            sync.backward(loss)
            if number == 2:
                sync.unscale_()
            same.append(_close(model, reference))
    return same


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_multiple_forwards_are_synced_by_the_last_backward(ranks, kind):
    assert ranks(2).run(_multiple_forwards, kind) == [[False, False, True]] * 2


def _no_sync_family(view: bool, wire: pe.wire.Wire | None) -> list[bool]:
    """torch's _test_accumulate_gradients_no_sync with the bare hook, forward under no_grad included."""
    rank, world = me()
    torch.manual_seed(31337)
    reference = nn.Sequential(nn.Linear(2, 10, bias=False), nn.ReLU(), nn.Linear(10, 4, bias=False))
    model = copy.deepcopy(reference)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    ddp.register_comm_hook(pe.HookState(wire=wire or pe.wire.FP32()), pe.comm_hook)
    x = torch.randn(2 * world, 2)
    y = torch.randn(2 * world, 4)
    mine = slice(2 * rank, 2 * rank + 2)
    with torch.no_grad(), ddp.no_sync():
        ddp.train()
        ddp(x)
    assert all(p.grad is None for p in model.parameters())
    same = []
    for iteration in range(4):
        mse_loss(reference(x), y).backward()
        if iteration % 2 == 0:
            with ddp.no_sync():
                mse_loss(ddp(x[mine]), y[mine]).backward()
        else:
            mse_loss(ddp(x[mine]), y[mine]).backward()
        same.append(
            all(
                torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5)
                for p, q in zip(model.parameters(), reference.parameters(), strict=True)
            )
        )
        x, y = x[torch.arange(len(x)).roll(1)], y[torch.arange(len(y)).roll(1)]
    return same


@pytest.mark.parametrize("view", [False, True])
def test_torch_accumulate_gradients_no_sync_with_our_hook(ranks, view):
    assert ranks(2).run(_no_sync_family, view, None) == [[False, True, False, True]] * 2


class Task(nn.Module):
    """torch's parity model: the gradient on every rank is known in closed form."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p = nn.Parameter(torch.randn(40, 20))

    def forward(self, x: Tensor) -> Tensor:
        return self.p * x


def _hook_parity(wire: pe.wire.Wire) -> None:
    """_test_ddp_hook_parity: hook gradients equal DDP's own and (world - 1) / 2, over many iterations."""
    rank, world = me()
    plain, hooked = DistributedDataParallel(Task()), DistributedDataParallel(Task())
    hooked.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
    for _ in range(20):
        for net in (plain, hooked):
            net.zero_grad()
            net(torch.full((40, 20), float(rank))).sum().backward()
        assert torch.equal(hooked.module.p.grad, plain.module.p.grad)
        assert torch.equal(hooked.module.p.grad, torch.full((40, 20), (world - 1) / 2))


@pytest.mark.parametrize("world", [2, 4])  # powers of two: the division is exact in every type
@pytest.mark.parametrize(
    "wire", [pe.wire.FP32(), pe.wire.BF16(), pe.wire.FP16()], ids=["fp32", "bf16", "fp16"]
)
def test_torch_ddp_hook_parity(ranks, world, wire):
    ranks(world).run(_hook_parity, wire)


def _uneven(kind: str, accumulate: int) -> list[float]:
    """test_ddp_uneven_inputs, with the gradient's content: DDP drops a joined rank's unsynced micro-batch."""
    rank, _ = me()
    model = nn.Linear(1, 1, bias=False)
    sync, forward = engine(kind, model, accumulate=accumulate)
    values = []
    for window in sync.windows([torch.full((1, 1), float(10**rank))] * (3 + 4 * rank)):
        for x in window:
            sync.backward(forward(x).sum())
        sync.unscale_()
        values.append(round(model.weight.grad.item(), 4))
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert dist.is_initialized()
    return values


@pytest.mark.parametrize(
    "accumulate, expected",
    [
        (
            2,
            [5.5, 21 / 3, 10.0, 10.0],
        ),  # 3 and 7 micro-batches of 1 and 10: (1,1|10,10), (1|10,10), (10,10), (10)
        (3, [5.5, 10.0, 10.0]),
        (8, [73 / 10]),
    ],
)
@pytest.mark.parametrize("kind", [*KINDS, "attach-unused"])
def test_uneven_inputs_average_over_the_micro_batches_that_exist(ranks, kind, accumulate, expected):
    for values in ranks(2).run(_uneven, kind, accumulate):
        assert values == [pytest.approx(value, abs=1e-3) for value in expected]


def _already_averaged(kind: str) -> None:
    """Lightning: after the syncing backward, an all-reduce divided by the world size is a bit-exact no-op."""
    rank, world = me()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    sync, forward = engine(kind, model, accumulate=2)
    torch.manual_seed(rank)
    for window in sync.windows([torch.randn(2, 5) for _ in range(4)]):
        for x in window:
            sync.backward(forward(x).square().sum())
        sync.unscale_()
        for p in model.parameters():
            again = p.grad.clone()
            dist.all_reduce(again)
            assert torch.equal(again / world, p.grad)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_lightning_gradients_are_already_averaged(ranks, kind):
    ranks(2).run(_already_averaged, kind)


def _window_count(batches: int, accumulate: int) -> int:
    model = nn.Linear(1, 1)
    sync = pe.GradSync(model, accumulate=accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return sum(
        sync.step(optimizer)
        for window in sync.windows([torch.ones(1, 1)] * batches)
        if [sync.backward(model(x).sum()) for x in window]
    )


@pytest.mark.parametrize(
    "batches, accumulate, steps", [(20, 1, 20), (20, 2, 10), (20, 3, 7), (64, 2, 32), (64, 3, 22)]
)
def test_lightning_counts_of_optimizer_steps(ranks, batches, accumulate, steps):
    assert ranks(1).run(_window_count, batches, accumulate) == [steps]


def _skip_flags() -> list[bool]:
    """Accelerate's test_optimizer: step_was_skipped for clean, nan, nan, clean gradients."""
    model = nn.Linear(1, 1)
    sync = pe.GradSync(model, accumulate=1)
    optimizer = sync.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    flags = []
    for value in (1.0, float("nan"), float("nan"), 1.0):
        with sync.accumulate():
            sync.backward(model(torch.full((1, 1), value)).sum())
            optimizer.step()
        flags.append(optimizer.step_was_skipped)
    return flags


def test_accelerate_step_was_skipped(ranks):
    assert ranks(2).run(_skip_flags) == [[False, True, True, False]] * 2
