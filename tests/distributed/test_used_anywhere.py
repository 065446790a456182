"""Where possible, hosts exchange which parameters were used, so that no host waits for a device.

Here gloo plays a backend whose collectives are ordered by streams; the hosts use gloo as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Breaks, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.comm import TorchDist
from pyengine.gradients import used_anywhere
from pyengine.window import header

KINDS = ("own", "attach", "fsdp")
WINDOWS = 4


def _is_of_hosts(group: dist.ProcessGroup | None) -> bool:
    return group is not None and "hosts of" in group.group_desc


@contextmanager
def _streams() -> Iterator[list[bool]]:
    """Make all transports stream-ordered except those between hosts.

    Yield a list that gets, for each exchange of used flags, whether it is between hosts. No header is read
    before its window ends.
    """
    make, tell = TorchDist.__init__, used_anywhere.UsedAnywhere.all_reduce
    by_hosts: list[bool] = []

    def init(self: Any, group: Any, device: torch.device) -> None:
        make(self, group, device)
        self.is_stream_ordered = not _is_of_hosts(self.group)

    def noted(self: Any, used: Any, **known: bool) -> Any:
        by_hosts.append(_is_of_hosts(self._comm.group))
        return tell(self, used, **known)

    with (
        mock.patch.object(TorchDist, "__init__", init),
        mock.patch.object(used_anywhere.UsedAnywhere, "all_reduce", noted),
        mock.patch.object(header, "_host_may_look", lambda *_: False),
    ):
        yield by_hosts


class _Experts(nn.Module):
    """A layer that every micro-batch uses, and experts that are used only if they are `chosen`."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(num))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.trunk(x)
        return x.sum() + sum(self.experts[index](x).sum() for index in chosen)


def _chosen(rank: int, world: int, window: int, micro_batch: int) -> list[int]:
    """Return a micro-batch's experts; the last rank's first one uses one more in every second window."""
    extra = [world] if (rank, micro_batch) == (world - 1, 0) and window % 2 else []
    return [(rank + window) % world if window < WINDOWS - 1 else 0, *extra]


def _used_by(world: int) -> list[set[int]]:
    """Return, by window, the experts that some rank uses."""
    everywhere = set(range(world))
    return [everywhere, everywhere | {world}, everywhere, {0, world}]


def _engine(kind: str, model: nn.Module, accumulator: str) -> tuple[pe.Sync, nn.Module]:
    if kind == "own":
        return pe.GradSync(model, accumulate=2, accumulator=accumulator, bucket_cap_mb=1e-4), model
    if kind.startswith("attach"):
        searches = kind == "attach-unused"  # DDP itself searches; hosts exchange flags all the same
        wrapped: nn.Module = DistributedDataParallel(
            model, bucket_cap_mb=1e-4, find_unused_parameters=searches
        )
    else:
        wrapped = fully_shard(model)
    return pe.attach(wrapped, accumulate=2, accumulator=accumulator), wrapped


def _trains(kind: str, accumulator: str, device: str = "cpu") -> tuple[list[list[bool]], list[bool]]:
    rank, world = me()
    seen = []
    if device == "cuda":
        torch.cuda.set_device(rank)
    with _streams() as by_hosts:
        sync, forward = _engine(kind, model := _Experts(world + 2).to(device), accumulator)
        for window in range(WINDOWS):
            for micro_batch in range(2):
                chosen = _chosen(rank, world, window, micro_batch)
                with sync.accumulate():
                    sync.backward(forward(torch.ones(2, 4, device=device), chosen))
            seen.append([expert.weight.grad is not None for expert in model.experts])
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
        sync.close()
    return seen, by_hosts


@pytest.mark.parametrize(
    ("kind", "world", "accumulator"),
    [
        ("own", 2, "fp32"),
        ("own", 3, "exact"),
        ("attach", 2, "exact"),
        ("attach-unused", 3, "fp32"),
        ("fsdp", 2, "fp32"),
    ],
)
def test_hosts_exchange_which_parameters_were_used(ranks, world, kind, accumulator):
    for seen, by_hosts in ranks(world).run(_trains, kind, accumulator):
        assert seen == [[index in used for index in range(world + 2)] for used in _used_by(world)]
        assert by_hosts == [True] * WINDOWS


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", KINDS)
def test_hosts_exchange_used_flags_beside_nccl(ranks, kind):
    for seen, by_hosts in ranks(2).over("cpu:gloo,cuda:nccl").run(_trains, kind, "fp32", "cuda"):
        assert seen == [[index in used for index in range(4)] for used in _used_by(2)]
        assert by_hosts == [True] * WINDOWS


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_rank_that_has_used_everything_waits_for_nobody(kind):
    """Rank 1 sends its flags only when rank 0, which uses everything, has ended its second window."""
    rank, _ = me()
    store, tell = dist.distributed_c10d._get_default_store(), used_anywhere.UsedAnywhere.all_reduce
    window = 0

    def tell_late(self: Any, used: Any, **known: bool) -> Any:
        if (rank, window) == (1, 1):
            store.wait(["through"], timedelta(seconds=20))
        return tell(self, used, **known)

    with mock.patch.object(used_anywhere.UsedAnywhere, "all_reduce", tell_late), _streams() as by_hosts:
        sync, forward = _engine(kind, _Experts(2), "fp32")
        for window in range(2):  # noqa: B007 - tell_late reads it
            for _ in range(2):
                with sync.accumulate():
                    sync.backward(forward(torch.ones(2, 4), [0, 1] if rank == 0 else [0]))
            sync.unscale_()
        if rank == 0:
            store.set("through", "")
        assert by_hosts == [True, True]
        sync.close()


@pytest.mark.parametrize("kind", ["own", "attach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_flags_are_sent_unless_the_header_says_that_all_is_used(kind, dtype):
    rank, _ = me()
    everything = [0, 1]
    # By window, which experts the two micro-batches of ranks 0 and 1 use.
    windows = [
        [(everything, [0]), (everything, [1])],
        [(everything, everything), ([0], everything)],  # rank 1 finds out too late for the header
        [(everything, everything), ([0], [0])],
        [([0], [0]), ([0], [0])],
        [(everything, []), (everything, everything)],
    ]
    launch = used_anywhere.UsedAnywhere.all_reduce
    skipped = []

    def noted(self: Any, used: Any, *, are_all: bool) -> Any:
        skipped.append(are_all)
        return launch(self, used, are_all=are_all)

    with mock.patch.object(used_anywhere.UsedAnywhere, "all_reduce", noted):
        sync, forward = _engine(kind, model := _Experts(2).to(dtype), "fp32")
        collectives, seen = [], []
        for window in windows:
            for chosen in window[rank]:
                with sync.accumulate():
                    sync.backward(forward(torch.ones(2, 4, dtype=dtype), chosen).float())
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
            collectives.append(sync.last_record.collectives)
            seen.append([expert.weight.grad is not None for expert in model.experts])
        sync.close()
    assert skipped == [True, False, False, False, True]
    assert collectives[2] - collectives[-1] == 1
    assert seen == [[True, True], [True, True], [True, True], [True, False], [True, True]]


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_hosts_stay_in_step_over_a_window_that_was_given_up(kind):
    rank, _ = me()
    seen = []
    with _streams():
        sync, forward = _engine(kind, model := _Experts(3), "fp32")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for window in range(4):
            chosen = [[window % 2], [0]][rank]
            for micro_batch in range(2):
                Breaks.now = (rank, window, micro_batch) == (1, 1, 1)
                with suppress(MemoryError), sync.accumulate():
                    sync.backward(forward(Breaks.apply(torch.ones(2, 4, requires_grad=True)), chosen))
            is_stepped = not Breaks.now and sync.step(optimizer)
            seen.append((is_stepped, [expert.weight.grad is not None for expert in model.experts]))
        sync.close()
    (first, _), (is_stepped, _), third, last = seen
    assert first and not is_stepped
    assert third == (True, [True, False, False])
    assert last == (True, [True, True, False])


@on_ranks(2)
def test_hosts_stay_in_step_behind_windows_of_different_engines():
    """Rank 1 once calls two engines in the opposite order, and continues as the error message says."""
    rank, _ = me()
    models = [_Experts(3), _Experts(3)]
    seen = []
    with _streams():
        syncs = [_engine("own", model, "fp32")[0] for model in models]

        def train(which: int, chosen: list[int]) -> None:
            for _ in range(2):
                with syncs[which].accumulate():
                    syncs[which].backward(models[which](torch.ones(2, 4), chosen))
            seen.append([expert.weight.grad is not None for expert in models[which].experts])
            syncs[which].step(torch.optim.SGD(models[which].parameters(), lr=0.0))

        for which in (0, 1):
            train(which, [0])
        with pytest.raises(RuntimeError, match="ranks have sent windows of different engines"):
            train(rank, [0])  # with unused parameters too, so that a rank waits for the other one
            syncs[rank].synchronize()
        for sync in syncs:
            sync.abandon()
        seen.clear()
        train(0, [rank])
        train(0, [0])
        train(1, [2 * rank])
        for sync in syncs:
            sync.close()
    assert seen == [[True, True, False], [True, False, False], [True, False, True]]


@on_ranks(2)
def test_hosts_survive_windows_of_engines_of_different_sizes():
    """Rank 1 calls another engine, whose only bucket is as long but has twice as many parameters."""
    rank, _ = me()
    models = [nn.ParameterList(torch.ones(2**16 // num) for _ in range(num)) for num in (8, 16)]
    with _streams():
        syncs = [pe.GradSync(model, accumulate=1) for model in models]
        with pytest.raises(RuntimeError) as error, syncs[rank].accumulate():
            syncs[rank].backward(sum(param.sum() for param in models[rank]))
        for sync in syncs:
            sync.abandon()
            sync.close()
    assert "ranks have sent windows of different engines" in str(error.value)


@on_ranks(2)
def test_hosts_give_up_when_the_engines_group_does():
    with _streams():
        sync, forward = _engine("own", _Experts(1), "fp32")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=33))
        for _ in range(2):
            with sync.accumulate():
                sync.backward(forward(torch.ones(2, 4), [0]))
        sync.unscale_()
        sync.close()
    groups = filter(_is_of_hosts, dist.distributed_c10d._world.pg_map)
    assert [group._get_backend(torch.device("cpu")).options._timeout for group in groups] == [
        timedelta(seconds=33)
    ]


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(2)
def test_a_frozen_unit_is_nothing_to_wait_for(accumulator):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with _streams(), mock.patch.object(used_anywhere, "Readback", wraps=used_anywhere.Readback) as reads:
        for layer in model:
            fully_shard(layer)
        sync = pe.attach(fully_shard(model), accumulate=1, accumulator=accumulator)
        for _ in range(2):
            with sync.accumulate():
                sync.backward(model(torch.ones(2, 4)).sum())
            sync.unscale_()
        sync.close()
    assert reads.call_count == 0


class _NeverDone:
    def wait(self) -> None:
        raise AssertionError("waited for the flags of all ranks")


def test_a_stream_always_waits_for_the_flags():
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    used = torch.ones(2, dtype=torch.uint8)
    flags = used_anywhere.UsedFlags([True, True], used, _NeverDone(), on_stream=True)
    with pytest.raises(AssertionError, match="waited for the flags"):
        flags.drop_unused(params)
