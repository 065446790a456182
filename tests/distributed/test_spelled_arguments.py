"""Arguments in PyTorch's spelling give the same bits as ours, and ranks may use different spellings."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from cases import Integers, engine, integers, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

WIRES = {torch.float32: pe.wire.FP32(), torch.bfloat16: pe.wire.BF16(), torch.float16: pe.wire.FP16()}


def _gradients(kind: str, **options: object) -> list[Tensor]:
    rank, _ = me()
    model = Integers(torch.bfloat16)
    sync, forward = engine(kind, model, accumulate=2, **options)
    for k in range(2):
        with sync.accumulate():
            sync.backward(forward(*integers(10 * rank + k)), count=3)
    sync.unscale_()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", WIRES, ids=str)
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_wire_may_be_spelled_as_its_dtype(kind, dtype):
    ours = WIRES[dtype] if me()[0] == 0 else dtype  # ranks may spell it differently
    spelled = _gradients(kind, wire=ours)
    assert all(map(torch.equal, spelled, _gradients(kind, wire=WIRES[dtype])))


@on_ranks(2)
def test_an_accumulator_may_be_spelled_as_torch_float32():
    module = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    for accumulator in (torch.float32, "fp32"):
        with pe.GradSync(module, accumulate=3, accumulator=accumulator) as sync:
            for value in (256.0, 1.0, 1.0):  # bfloat16 represents 258, but not 257
                with sync.accumulate():
                    sync.backward(module(torch.full((1, 2), value, dtype=torch.bfloat16)).sum() / 1.0)
            sync.unscale_()
            assert torch.equal(module.weight.grad, torch.full_like(module.weight, 258 / 3))


# DDP's hooks.

HOOKS = {
    "comm_hook, None": lambda: (None, pe.comm_hook),
    "comm_hook, group": lambda: (dist.group.WORLD, pe.comm_hook),
    "comm_hook, state": lambda: (pe.HookState(wire=torch.float32), pe.comm_hook),
    "comm_hook, bf16 state": lambda: (pe.HookState(wire=torch.bfloat16), pe.comm_hook),
    "comm_hook, fp16 state": lambda: (pe.HookState(wire=torch.float16), pe.comm_hook),
    "comm_hook, state of a group": lambda: (pe.HookState(dist.group.WORLD), pe.comm_hook),
}


@pytest.mark.parametrize(
    ("case", "world", "view"),
    [*((case, 2, False) for case in HOOKS), ("comm_hook, None", 4, True), ("comm_hook, bf16 state", 1, True)],
)
@on_ranks()
def test_a_hook_in_torchs_manner_gives_ddps_mean(case, view):
    """Small integers and their mean over one, two or four ranks are exact in every dtype."""
    rank, world = me()
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=2e-4, gradient_as_bucket_view=view)
    ddp.register_comm_hook(*HOOKS[case]())
    twin = DistributedDataParallel(copy.deepcopy(model))
    for p in (*model.parameters(), *twin.parameters()):
        nn.init.eye_(p)
    for number in range(3):
        x = torch.full((1, 8), float(rank + number))
        for each in (ddp, twin):
            each.zero_grad()
            each(x).sum().backward()
        for p, q in zip(ddp.parameters(), twin.parameters(), strict=True):
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad, q.grad), number
            assert p.grad[0, 0] == (world - 1) / 2 + number


@on_ranks(2)
def test_a_hook_in_torchs_manner_reduces_over_the_group_it_is_registered_with():
    rank, world = me()
    groups = [dist.new_group([r]) for r in range(world)]
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=groups[rank])
    ddp.register_comm_hook(groups[rank], pe.comm_hook)
    ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
    assert ddp.module.weight.grad.item() == [1.0, 2.0][me()[0]]


@on_ranks(2)
def test_a_state_of_another_kind_is_refused_in_the_first_backward_on_every_rank():
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    ddp.register_comm_hook("dp", pe.comm_hook)
    with pytest.raises((TypeError, RuntimeError)) as error:
        ddp(torch.ones(1, 1)).sum().backward()
    assert "process_group='dp' is a str: expected a torch.distributed.ProcessGroup" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process_group": pe.wire.BF16()}, "pass a wire as wire="),
        ({"process_group": torch.bfloat16}, "process_group=torch.bfloat16 is a dtype"),
        ({"wire": "bf17"}, "wire='bf17': expected a wire"),
    ],
)
def test_what_makes_no_state_is_refused_when_it_is_made(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pe.HookState(**options)
