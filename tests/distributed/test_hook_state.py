"""The state of `comm_hook`: one for several models, copied, pickled, made early,
and over gradients wider than its wire.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist
from cases import me
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

WIRES = {"fp32": pe.wire.FP32(), "bf16": pe.wire.BF16(), "fp16": pe.wire.FP16()}


def _twins(wire: str, static: bool) -> None:
    """Two models of equal shapes in one backward; gradients are small integers, exact in every type."""
    rank, world = me()
    state = pe.HookState(wire=WIRES[wire])
    twins = [nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3)) for _ in range(2)]
    ddps = []
    for twin in twins:
        module = _Each(twin)
        ddps.append(DistributedDataParallel(module, bucket_cap_mb=1e-5, static_graph=static))
        ddps[-1].register_comm_hook(state, pe.comm_hook)
    for number in range(4):
        x = torch.full((1, 64), float(1 + rank))
        for ddp in ddps:
            ddp.zero_grad()
        loss = sum((k + 1) * ddp(x, number) for k, ddp in enumerate(ddps))
        loss.backward()
        for k, twin in enumerate(twins):
            for layer, linear in enumerate(twin):
                want = (k + 1) * (layer + number + 1) * sum(range(1, world + 1)) / world
                assert torch.equal(linear.weight.grad, torch.full((64, 64), want)), (number, k, layer)


class _Each(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, number: int) -> Tensor:
        return sum((i + number + 1) * layer(x).sum() for i, layer in enumerate(self.layers))


@pytest.mark.parametrize(
    ("world", "wire", "static"), [(1, "fp16", False), (2, "bf16", False), (2, "fp32", True)]
)
def test_one_state_serves_two_models_in_one_backward(ranks, world, wire, static):
    ranks(world).run(_twins, wire, static)


def _lanes_after_a_rebuild() -> int:
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), bucket_cap_mb=5e-4)
    state = pe.HookState(wire=pe.wire.BF16())
    ddp.register_comm_hook(state, pe.comm_hook)
    for _ in range(3):
        ddp(torch.ones(1, 8)).sum().backward()
    return sum(buffer.numel for buffer in state._wire_buffers.values()) - sum(
        p.numel() for p in ddp.parameters()
    )


def test_buffers_of_buckets_that_ddp_has_rebuilt_are_let_go(ranks):
    assert ranks(2).run(_lanes_after_a_rebuild) == [0, 0]


def _wider(wire: str) -> None:
    rank, world = me()
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(pe.HookState(wire=WIRES[wire]), pe.comm_hook)
    ddp(torch.full((1, 5), 1 / 3 + rank, dtype=torch.float64)).sum().backward()
    want = sum(1 / 3 + r for r in range(world)) / world
    # A narrow wire rounds each term, the sum after each addition: at most `world` half units of its
    # precision.
    tolerance = 1e-15 if wire == "fp32" else world * torch.finfo(WIRES[wire].dtype).eps
    assert model.weight.grad.dtype == torch.float64
    assert torch.allclose(model.weight.grad, torch.full((1, 5), want, dtype=torch.float64), rtol=tolerance)


@pytest.mark.parametrize(("world", "wire"), [(2, "fp32"), (3, "bf16")])
def test_float64_gradients_keep_their_bits_unless_the_wire_is_narrow(ranks, world, wire):
    ranks(world).run(_wider, wire)


def _complex() -> None:
    rank, world = me()
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False, dtype=torch.complex64))
    ddp.register_comm_hook(pe.HookState(wire=pe.wire.BF16()), pe.comm_hook)
    ddp(torch.full((1, 2), 1 + (rank + 1) * 1j)).real.sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((1, 2), 1 - (world + 1) / 2 * 1j))


def test_complex_gradients_travel_by_real_and_imaginary_part(ranks):
    ranks(2).run(_complex)


def _mean(ddp: DistributedDataParallel) -> float:
    rank, _ = me()
    ddp.zero_grad()
    ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
    return next(ddp.parameters()).grad.item()


def _copies(how: str) -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    state = pe.HookState(wire=pe.wire.BF16())
    ddp.register_comm_hook(state, pe.comm_hook)
    assert _mean(ddp) == 1.5
    if how == "model":
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert torch.equal(twin.module.weight, ddp.module.weight)
        return
    other = pickle.loads(pickle.dumps(state)) if how == "pickle" else getattr(copy, how)(state)
    assert other is not state and other.wire == state.wire
    twin = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    twin.register_comm_hook(other, pe.comm_hook)
    assert _mean(twin) == _mean(ddp) == 1.5


@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy", "model"])
def test_a_used_state_can_be_copied_and_pickled_and_so_can_its_model(ranks, how):
    ranks(2).run(_copies, how)


def _group_in_a_pickle() -> None:
    group = dist.new_group([0, 1])
    state = pe.HookState(wire=pe.wire.BF16(), process_group=group)
    assert copy.deepcopy(state).group is group
    with pytest.warns(UserWarning, match="a process group cannot be pickled"):
        assert pickle.loads(pickle.dumps(state)).group is None


def test_a_pickled_state_says_that_it_leaves_its_group_behind(ranks):
    ranks(2).run(_group_in_a_pickle)


def _attached_copy() -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    sync = pe.attach(ddp, accumulate=1)
    with sync.accumulate():
        sync.backward(ddp(torch.ones(1, 1)).sum())
    sync.abandon()
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copy or save ddp_model.module"):
            how(ddp)
    copy.deepcopy(ddp.module)


def test_a_model_driven_by_attach_is_not_copied_into_one_that_nobody_synchronises(ranks):
    ranks(2).run(_attached_copy)


def test_a_state_can_be_made_before_the_process_group():
    state = pe.HookState(wire=pe.wire.BF16())
    assert pickle.loads(pickle.dumps(state)).wire == pe.wire.BF16()


class _Held:
    """A collective whose thread lets go of what it has called back some time after it has."""

    def __init__(self, work: pe.wire.Work) -> None:
        self.wait, self._future = work.wait, work.get_future()

    def get_future(self) -> _Held:
        return self

    def then(self, callback: Callable[[object], Tensor]) -> torch.futures.Future[Tensor]:
        threading.Thread(target=lambda held: time.sleep(0.2), args=(callback,)).start()
        return self._future.then(callback)


@dataclass(frozen=True)
class _HeldWire(pe.wire.FP32):
    def all_reduce_(self, flat: Tensor, comm: pe.wire.Comm) -> pe.wire.Work:
        return _Held(super().all_reduce_(flat, comm))


def _held() -> int:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    sync = pe.attach(ddp, accumulate=1, wire=_HeldWire())
    for window in sync.windows([torch.ones(1, 2)]):
        for x in window:
            sync.backward(ddp(x).sum())
        sync.grad_norm()
        alive = len(sync._engine.reducer.state.callbacks.pending)
        sync.abandon()
    return alive


def test_a_window_that_has_landed_leaves_no_thread_that_needs_the_interpreter(ranks):
    """What ended the process then was aborted: a thread of the backend freed its callback too late."""
    assert ranks(2).run(_held) == [0, 0]


class _Noted:
    """A collective of which the test keeps what it calls back."""

    def __init__(self, work: pe.wire.Work, noted: list[object]) -> None:
        self.wait, self._future, self._noted = work.wait, work.get_future(), noted

    def get_future(self) -> _Noted:
        return self

    def then(self, callback: Callable[[object], Tensor]) -> torch.futures.Future[Tensor]:
        self._noted.append(callback)
        return self._future.then(callback)


@dataclass(frozen=True)
class _NotedWire(pe.wire.FP32):
    noted: list[object] = field(default_factory=list, hash=False)

    def all_reduce_(self, flat: Tensor, comm: pe.wire.Comm) -> pe.wire.Work:
        return _Noted(super().all_reduce_(flat, comm), self.noted)


def _reached(root: object) -> dict[int, object]:
    """Return all objects that one keeps alive, besides modules, what those hold, and types."""
    found: dict[int, object] = {}
    left = [root]
    while left:
        one = left.pop()
        if id(one) in found or isinstance(one, type | ModuleType):
            continue
        found[id(one)] = one
        if isinstance(one, FunctionType):
            left += [one.__defaults__, one.__kwdefaults__, one.__closure__]
        else:
            left += gc.get_referents(one)
    return found


def _kept_by_a_thread() -> set[str]:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    wire = _NotedWire()
    ddp.register_comm_hook(pe.HookState(wire=wire), pe.comm_hook)
    ddp(torch.ones(1, 2)).sum().backward()
    (callback,) = wire.noted
    return {type(one).__name__ for one in _reached(callback).values()}


def test_a_thread_of_the_backend_is_not_the_last_to_hold_its_group(ranks):
    """It would join itself, and end the process; nobody waits until it has let go of what it called back."""
    for kept in ranks(2).run(_kept_by_a_thread):
        assert "StoreRollCall" in kept and not kept & {"ProcessGroup", "TorchDist", "HookState"}
