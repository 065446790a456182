"""The state of `comm_hook`: shared by models, copied, pickled, or created before the process group."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import WIRES, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


def _hooked(module: nn.Module, state: pe.HookState, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, **options)
    ddp.register_comm_hook(state, pe.comm_hook)
    return ddp


class _Each(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return sum((i + number + 1) * layer(x).sum() for i, layer in enumerate(self.layers))


@pytest.mark.parametrize(
    ("world", "wire", "static"), [(1, "fp16", False), (2, "bf16", False), (2, "fp32", True)]
)
@on_ranks()
def test_one_state_serves_two_models_in_one_backward(wire, static):
    """The models have equal shapes; gradients are small integers, which are exact in every dtype."""
    rank, world = me()
    state = pe.HookState(wire=WIRES[wire])
    ddps = [_hooked(_Each(), state, bucket_cap_mb=1e-5, static_graph=static) for _ in range(2)]
    for number in range(4):
        x = torch.full((1, 64), float(1 + rank))
        for ddp in ddps:
            ddp.zero_grad()
        sum((k + 1) * ddp(x, number) for k, ddp in enumerate(ddps)).backward()
        for k, ddp in enumerate(ddps):
            for layer, linear in enumerate(ddp.module.layers):
                want = (k + 1) * (layer + number + 1) * (world + 1) / 2
                assert torch.equal(linear.weight.grad, torch.full((64, 64), want)), (number, k, layer)


@on_ranks(2)
def test_buffers_of_buckets_that_ddp_has_rebuilt_are_let_go():
    state = pe.HookState(wire=pe.wire.BF16())
    ddp = _hooked(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), state, bucket_cap_mb=5e-4)
    for _ in range(3):
        ddp(torch.ones(1, 8)).sum().backward()
    assert sum(b.numel for b in state._wire_buffers.values()) == sum(p.numel() for p in ddp.parameters())


@on_ranks(2)
def test_complex_gradients_travel_by_real_and_imaginary_part():
    rank, world = me()
    model = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    ddp = _hooked(model, pe.HookState(wire=pe.wire.BF16()))
    ddp(torch.full((1, 2), 1 + (rank + 1) * 1j)).real.sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((1, 2), 1 - (world + 1) / 2 * 1j))


def _mean(ddp: DistributedDataParallel) -> float:
    rank, _ = me()
    ddp.zero_grad()
    ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
    return next(ddp.parameters()).grad.item()


@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy", "model"])
@on_ranks(2)
def test_a_used_state_can_be_copied_and_pickled_and_so_can_its_model(how):
    state = pe.HookState(wire=pe.wire.BF16())
    ddp = _hooked(nn.Linear(1, 1, bias=False), state)
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
    assert _mean(_hooked(nn.Linear(1, 1, bias=False), other)) == _mean(ddp) == 1.5


@on_ranks(2)
def test_a_pickled_state_says_that_it_leaves_its_group_behind():
    group = dist.new_group([0, 1])
    state = pe.HookState(wire=pe.wire.BF16(), process_group=group)
    assert copy.deepcopy(state).group is group
    with pytest.warns(UserWarning, match="a process group cannot be pickled"):
        assert pickle.loads(pickle.dumps(state)).group is None


@on_ranks(2)
def test_a_model_driven_by_attach_is_not_copied_into_one_that_nobody_synchronises():
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    sync = pe.attach(ddp, accumulate=1)
    with sync.accumulate():
        sync.backward(ddp(torch.ones(1, 1)).sum())
    sync.abandon()
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copy or save ddp_model.module"):
            how(ddp)
    copy.deepcopy(ddp.module)


def test_a_state_can_be_made_before_the_process_group():
    state = pe.HookState(wire=pe.wire.BF16())
    assert pickle.loads(pickle.dumps(state)).wire == pe.wire.BF16()


class _Kept:
    """A collective that passes its callback to `keep`, which holds it like a thread of the backend."""

    def __init__(self, work: pe.wire.Work, keep: Callable[[object], None]) -> None:
        self.wait, self._future, self._keep = work.wait, work.get_future(), keep

    def get_future(self) -> _Kept:
        return self

    def then(self, callback: Callable[[object], Tensor]) -> torch.futures.Future[Tensor]:
        self._keep(callback)
        return self._future.then(callback)


@dataclass(frozen=True)
class _KeptWire(pe.wire.FP32):
    keep: Callable[[object], None] = field(default=print, repr=False)  # ranks compare the repr of wires

    def all_reduce_(self, flat: Tensor, comm: pe.wire.Comm) -> pe.wire.Work:
        return _Kept(super().all_reduce_(flat, comm), self.keep)


def _reached(root: object) -> dict[int, object]:
    """Return all objects that `root` keeps alive, except modules, types, and objects reached through them."""
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


@on_ranks(2)
def test_a_thread_of_the_backend_is_not_the_last_to_hold_its_group():
    """The thread would join itself and end the process; nothing waits until it drops its callback."""
    noted: list[object] = []
    ddp = _hooked(nn.Linear(2, 1), pe.HookState(wire=_KeptWire(keep=noted.append)))
    ddp(torch.ones(1, 2)).sum().backward()
    (callback,) = noted
    kept = {type(one).__name__ for one in _reached(callback).values()}
    assert "StoreRollCall" in kept and not kept & {"ProcessGroup", "TorchDist", "HookState"}
