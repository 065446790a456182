"""What is refused on XLA, and how replicas agree when an engine is created."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from xla_cases import device

import pyengine as pe
from pyengine.ops.device import flush


def _refused(rank: int, make, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        make(rank)
    return str(caught.value)


def _make(rank: int, **kwargs) -> pe.GradSync:
    return pe.GradSync(nn.Linear(3, 2).to(device()), accumulate=2, **kwargs)


def _differ(rank: int) -> pe.GradSync:
    return pe.GradSync(nn.Linear(3, 2 + rank).to(device()), accumulate=2)


def _sharded(rank: int) -> pe.GradSync:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    model = XlaFullyShardedDataParallel(nn.Linear(64, 64).to(device()))
    before = [param.detach().cpu() for param in model.parameters()]
    try:
        return pe.GradSync(model, accumulate=2)
    finally:
        after = [param.detach().cpu() for param in model.parameters()]
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def _sharded_parameters(rank: int) -> pe.GradSync:
    shard = nn.Parameter(torch.full((4,), float(rank)).to(device()))
    shard._is_sharded = True
    try:
        return pe.GradSync([("shard", shard)], accumulate=2)
    finally:
        assert shard.detach().cpu().eq(rank).all()


def _grouped(rank: int) -> pe.GradSync:
    return _make(rank, process_group=torch.distributed.ProcessGroup(0, 1))


def _attach(rank: int) -> pe.Sync:
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend

    dist.init_process_group("xla", init_method="xla://")
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2).to(device()))
        return pe.attach(model, accumulate=2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "make", "message"),
    [
        (1, partial(_make, accumulator="exact"), "accumulator='exact' sums integers in memory"),
        (
            2,
            partial(_make, wire=pe.wire.BF16()),
            "XLA's CPU backend has no all-reduce of bfloat16; use wire.FP32",
        ),
        (
            1,
            partial(_make, process_group="mine"),
            "process_group='mine' is a str: expected a torch.distributed.ProcessGroup",
        ),
        (1, _grouped, ": gradients on xla:0 are reduced by torch_xla over all"),
        (1, _attach, "ddp_model is on xla:0: DDP reduces gradients during the backward"),
        (2, _differ, "parameter 0: rank 0 has 'weight' [2, 3] float32; rank 1 has 'weight' [3, 3] float32"),
        (2, _sharded, "params_or_module has a XlaFullyShardedDataParallel"),
        (2, _sharded_parameters, "parameter 'shard' is a shard (_is_sharded)"),
    ],
    ids=["exact", "bf16", "no group", "group", "ddp", "other model", "torch_xla's FSDP", "its parameters"],
)
def test_what_cannot_work_is_refused_on_every_replica(replicas, world, make, message):
    for text in replicas(world).run(_refused, make, ValueError):
        assert message in text


def _step(rank: int, optimizer) -> None:
    param = nn.Parameter(torch.ones(3).to(device()))
    sync = pe.GradSync([param], accumulate=1)
    steps = optimizer([param])
    with sync.accumulate():
        sync.backward(param.sum())
        sync.step(steps)


class _CountsInGroup(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.AdamW, "use AdamW(..., capturable=True): with"),
        (partial(torch.optim.AdamW, foreach=True), "use AdamW(..., capturable=True, foreach=False): with"),
        (torch.optim.Adadelta, "nonfinite='raise', so that the host reads the outcome"),
        (torch.optim.Adagrad, "Adagrad keeps 'step' on the host"),
        (_CountsInGroup, "_CountsInGroup counts in its param_groups"),
    ],
)
def test_an_optimizer_whose_steps_cannot_be_undone_is_refused(replicas, optimizer, message):
    (text,) = replicas(1).run(_refused, partial(_step, optimizer=optimizer), ValueError)
    assert message in text


class _Everything(nn.Module):
    """Parameters and buffers of every dtype, with different values on every replica."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        numbers = torch.tensor([-0.0, 1 / 3, -2.5, 3e38]) * (1 if rank == 0 else float("nan"))
        self.p32 = nn.Parameter(numbers)
        self.brain, self.p16 = nn.Parameter(numbers.bfloat16()), nn.Parameter(numbers.half())
        self.register_buffer("f64", numbers.double() / 3)
        sign = 1 - 2 * rank
        self.register_buffer("i64", sign * torch.tensor([2**62 + 12345678901, -3, 0]))
        self.register_buffer("i32", sign * torch.tensor([2**31 - 1, -7], dtype=torch.int32))
        self.register_buffer("u8", torch.tensor([255 - rank, 7], dtype=torch.uint8))
        self.register_buffer("flag", torch.tensor([rank == 0, rank == 1]))


def _values(rank: int) -> list[torch.Tensor]:
    model = _Everything(rank).to(device())
    pe.GradSync(model, accumulate=1)
    return [t.detach().cpu() for t in [*model.parameters(), *model.buffers()]]


def test_every_replica_gets_the_values_of_the_first_exactly(replicas):
    model = _Everything(0)
    expected = [t.detach() for t in [*model.parameters(), *model.buffers()]]
    for values in replicas(2).run(_values):
        for value, right in zip(values, expected, strict=True):
            assert value.dtype == right.dtype
            assert torch.equal(value, right)


def _sum(rank: int) -> list[float]:
    from pyengine.comm.xla import Xla

    comm = Xla(device())
    flat = torch.tensor(
        [2.0**53 - 1 if rank == 0 else 1.0, 0.1 * (rank + 1), float("inf") if rank == 1 else 0.0],
        dtype=torch.float64,
    ).to(device())
    comm.all_reduce(flat).wait()
    flush(device())
    return flat.cpu().tolist()


def test_float64_is_summed_as_float64(replicas):
    assert replicas(2).run(_sum) == [[2.0**53, 0.1 + 0.2, float("inf")]] * 2
