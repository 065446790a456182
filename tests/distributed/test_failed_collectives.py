"""A bucket whose collective failed: the error comes out on the rank,
and nothing is stepped with what it left.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from cases import me
from marks import rest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

KINDS = {
    "fp32": (torch.float32, {}),
    "bf16 wire": (torch.float32, {"wire": pe.wire.BF16()}),
    "bf16 sums": (torch.bfloat16, {}),
    "exact": (torch.float32, {"accumulator": "exact"}),
}


class Broken:
    """A collective that fails some time after it was launched."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_exception(RuntimeError("connection lost"))

    def wait(self) -> None:
        self._future.wait()

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


def _break(state: pe.HookState, numel: int) -> None:
    """Let every collective of at least `numel` elements fail from now on: buckets, not headers."""
    comm = state.comm(torch.device("cpu"))
    all_reduce = comm.all_reduce
    comm.all_reduce = lambda flat: Broken() if flat.numel() >= numel else all_reduce(flat)
    comm.all_to_all = lambda received, parts: Broken()


def _ddp(dtype: torch.dtype = torch.float32, **options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, dtype=dtype), nn.Linear(30, 1, dtype=dtype))
    return DistributedDataParallel(model, **options)


def _hook(wire: pe.wire.Wire) -> None:
    ddp = _ddp()
    state = pe.HookState(wire=wire)
    ddp.register_comm_hook(state, pe.comm_hook)
    _break(state, 100)
    with pytest.raises(RuntimeError, match="connection lost") as found:
        ddp(torch.ones(2, 40)).sum().backward()
    assert "Unable to cast" not in str(found.value)


@pytest.mark.parametrize(
    "wire", [pe.wire.FP32(), pe.wire.BF16(), pe.wire.Int8()], ids=["fp32", "bf16", "int8"]
)
def test_the_hook_raises_what_broke_its_collective_as_stock_ddp_does(ranks, wire):
    ranks(2).run(_hook, wire)


def _attached(kind: str, unused: bool, fused: bool) -> None:
    dtype, options = KINDS[kind]
    ddp = _ddp(dtype, find_unused_parameters=unused)
    before = [p.detach().clone() for p in ddp.parameters()]
    sync = pe.attach(ddp, accumulate=2, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, fused=fused)
    _break(sync._engine.reducer.state, 100)
    x = torch.ones(2, 40, dtype=dtype)
    with pytest.raises(RuntimeError, match=r"^a collective failed: .*connection lost"):
        for window in sync.windows([x, x]):
            for batch in window:
                sync.backward(ddp(batch).sum().float())
    for _ in range(2):  # and it stays so
        with pytest.raises(RuntimeError, match="were not reduced: a collective failed on this rank"):
            sync.step(optimizer)
    with pytest.raises(RuntimeError, match="from a checkpoint"):
        next(sync.windows([x, x]))
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))


@pytest.mark.parametrize("fused", [True, *rest(False)])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attach_raises_and_never_steps_with_half_reduced_gradients(ranks, kind, unused, fused):
    ranks(2).run(_attached, kind, unused, fused)


def _times_out(kind: str) -> tuple[str, str, bool]:
    """Rank 1 comes later to the backward than the group waits."""
    rank, _ = me()
    group = dist.new_group(timeout=timedelta(seconds=1))
    ddp = _ddp(process_group=group)
    before = [p.detach().clone() for p in ddp.parameters()]
    if kind == "hook":
        ddp.register_comm_hook(pe.HookState(wire=pe.wire.BF16(), process_group=group), pe.comm_hook)
    elif kind == "attach":
        sync = pe.attach(ddp, accumulate=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    errors = ["", ""]
    loss = ddp(torch.ones(2, 40)).sum()
    time.sleep(2.0 * (rank == 1))
    try:
        if kind == "attach":
            with sync.accumulate():
                sync.backward(loss)
        else:
            loss.backward()
    except RuntimeError as error:
        errors[0] = str(error)
    if kind == "attach":
        try:
            sync.step(optimizer)
        except RuntimeError as error:
            errors[1] = str(error)
    elif not errors[0]:
        optimizer.step()
    moved = any(not torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
    return (*errors, moved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stock", "hook", "attach"])
def test_a_rank_that_comes_too_late_raises_everywhere_and_nobody_steps(ranks, kind):
    for first, _, moved in ranks(2).run(_times_out, kind):
        assert first and not moved


def _cannot_start() -> str:
    """Rank 1 has no memory for the second collective of an exact sum."""
    rank, _ = me()
    model = _ddp()
    sync = pe.attach(model, accumulate=2, accumulator="exact", stall_after_s=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        sync._engine.reducer._comm.all_reduce = Mock(side_effect=MemoryError("no memory"))
    for _ in range(2):
        with suppress(RuntimeError, MemoryError), sync.accumulate():  # now, or where the window lands
            sync.backward(model(torch.ones(2, 40)).sum())
    with pytest.raises((RuntimeError, MemoryError)) as error:
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return str(error.value)


@pytest.mark.slow  # what the ranks have left under way is given up after a minute
def test_a_rank_that_cannot_start_a_later_collective_of_a_bucket_raises_on_all(ranks):
    for said in ranks(2).run(_cannot_start):
        assert "no memory" in said or "a collective failed" in said
