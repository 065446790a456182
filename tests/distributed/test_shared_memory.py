"""With `shared_memory=True`, ranks of one host reduce in shared memory where possible, and leave no traces.

`tests/unit/test_arena.py` tests what a reduction computes.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Integers, engine, me, recorded_warnings, windows_of_integers
from marks import rest
from ranks import on_ranks
from shared_memory_cases import Reductions, trained
from torch import nn

import pyengine as pe
from pyengine.comm import shared_memory
from pyengine.comm.arena import Arena, MemoryOffer

BF16_WIRE = {"wire": pe.wire.BF16()}


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("own", torch.bfloat16, {}),
        ("own", torch.float32, BF16_WIRE),
        ("own-native", torch.float32, {}),
        ("own-exact", torch.bfloat16, {}),
        ("attach", torch.float32, BF16_WIRE),
        ("attach-view", torch.bfloat16, {}),
    ],
    ids=str,
)
def test_buckets_travel_in_shared_memory_and_buffers_of_the_engine_are_allocated_there(
    ranks, kind, dtype, options
):
    for num, in_place in ranks(2).run(trained, kind, dtype, **options):
        assert num >= 2
        if kind.startswith("own") or options:
            assert in_place == num


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_shared_memory_false_goes_through_the_group(ranks, kind):
    assert ranks(2).run(trained, kind, torch.float32, shared_memory=False) == [(0, 0)] * 2
    assert ranks(1).run(trained, kind, torch.float32) == [(0, 0)]


def _hooked(wire: pe.wire.Wire) -> tuple[torch.Tensor, torch.Tensor, int, int, bool]:
    """Return the gradient, the mean in rank order, the numbers of reductions, and whether nothing is left."""
    rank, world = me()
    before = _traces()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
    twin = copy.deepcopy(model)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    state = copy.copy(pe.HookState(wire=wire, shared_memory=True))
    ddp.register_comm_hook(pickle.loads(pickle.dumps(state)), pe.comm_hook)
    torch.manual_seed(1 + rank)
    with Reductions() as seen:
        for _ in range(3):  # DDP rebuilds its buckets after the first one
            x = torch.randn(64, 300)
            ddp.zero_grad()
            ddp(x).square().sum().backward()
    twin(x).square().sum().backward()
    own = [torch.empty(0)] * world
    dist.all_gather_object(own, twin[0].weight.grad)
    total = own[0]
    for part in own[1:]:
        total = total + part
    grad = model[0].weight.grad.clone()
    del ddp, model, state
    return grad, total * torch.tensor(1.0 / world), seen.num, seen.num_in_place, _traces() == before


@pytest.mark.parametrize("world", [1, 3, *rest(4)])
def test_a_bare_hook_reduces_in_shared_memory_in_the_order_of_ranks_and_leaves_nothing(ranks, world):
    for wire in (pe.wire.FP32(), pe.wire.BF16()):
        found = ranks(world).run(_hooked, wire)
        for grad, mean, num, in_place, is_clean in found:
            assert torch.equal(grad, found[0][0]) and is_clean
            assert (num > 0) == (world > 1)
            if wire == pe.wire.FP32():
                assert torch.equal(grad, mean) and in_place == 0  # buckets are in DDP's memory
            else:
                assert in_place == num


def _without_a_file_on_rank_1() -> tuple[list[str], int]:
    """Train; return the warnings, and the number of reductions in shared memory."""
    make = MemoryOffer.make

    def limited(world: int) -> MemoryOffer:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit[1]))
        try:
            return make(world)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with (
        mock.patch.object(MemoryOffer, "make", limited if me()[0] == 1 else make),
        recorded_warnings(RuntimeWarning) as texts,
    ):
        num, _ = trained("own", torch.float32)
    return [text for text in texts if "ranks reduce through" in text], num


def test_where_a_rank_can_make_no_file_all_go_through_the_group_and_rank_0_says_why(ranks):
    warned = ranks(3).run(_without_a_file_on_rank_1)
    assert [(len(texts), num) for texts, num in warned] == [(1, 0), (0, 0), (0, 0)]
    assert "leave shared_memory=True out: 3 ranks reduce through their process group" in warned[0][0][0]
    assert "memfd_create: [Errno 27] File too large" in warned[0][0][0]


@on_ranks(3)
def test_where_a_rank_has_no_memory_to_share_buckets_are_copied():
    with pytest.MonkeyPatch.context() as patch, recorded_warnings(RuntimeWarning) as texts:
        if me()[0] == 1:
            patch.setattr(Arena, "allocate", lambda self, numel, dtype: torch.zeros(numel, dtype=dtype))
        num, _ = trained("own", torch.float32)
    assert num >= 2 and not any("ranks reduce through" in text for text in texts)


def _traces() -> tuple[int, int, int]:
    """Return the numbers of descriptors, mappings and threads for shared memory in this process."""
    gc.collect()
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    threads = [thread for thread in threading.enumerate() if thread.name == "pyengine-shared"]
    return sum("memfd:pyengine" in e for e in links), sum("memfd:pyengine" in e for e in maps), len(threads)


@pytest.mark.parametrize(
    ("kind", "ends"), [("own", "close"), ("own", "dropped"), ("own-native", "close"), ("attach", "dropped")]
)
@on_ranks(2)
def test_nothing_is_left_of_an_engine(kind, ends):
    before = _traces()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2, shared_memory=True)
    windows_of_integers(sync, forward, model, num=3)  # the bucket order changes in the second window
    under_way = _traces()
    if ends == "close":
        sync.close()
    closed = _traces()
    del sync, forward
    if ends == "dropped":
        del model  # its parameters have views of the buffers
    assert _traces() == before < under_way
    assert closed[2] == (before[2] if ends == "close" else under_way[2])


@on_ranks(2)
def test_an_argument_that_is_no_bool_and_ranks_that_differ_are_refused():
    with pytest.raises(ValueError, match="shared_memory=1: expected True"):
        pe.HookState(shared_memory=1)
    with pytest.raises(ValueError, match="shared_memory='no': expected True"):
        pe.GradSync(nn.Linear(2, 2), shared_memory="no")
    with pytest.raises(ValueError, match="ranks have different settings"):
        pe.GradSync(nn.Linear(2, 2), shared_memory=me()[0] == 0)


@pytest.mark.parametrize("owner", ["own", "attach", "hook"])
@on_ranks(2)
def test_memory_of_an_accelerator_is_refused_on_every_rank(owner):
    model, on_rank_1 = nn.Linear(2, 2), lambda device: me()[0] == 1
    with mock.patch.object(shared_memory, "runs_ahead", on_rank_1), pytest.raises(ValueError) as error:
        if owner == "own":
            pe.GradSync(model, shared_memory=True)
        elif owner == "hook":
            ddp = nn.parallel.DistributedDataParallel(model)
            ddp.register_comm_hook(pe.HookState(shared_memory=True), pe.comm_hook)
            ddp(torch.ones(1, 2)).sum().backward()
        else:
            pe.attach(nn.parallel.DistributedDataParallel(model), shared_memory=True)
    assert str(error.value).startswith("rank 1: shared_memory=True, but parameters are on cpu")
