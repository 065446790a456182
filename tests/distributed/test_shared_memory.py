"""Ranks of one host reduce in memory that they share: chosen by default, left where it cannot be, and nothing
remains of it. What a reduction computes is in `tests/unit/test_arena.py`.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from cases import Integers, engine, me, windows_of_integers
from marks import rest
from torch import nn

import pyengine as pe
from pyengine.comm import roll_call, shared_memory
from pyengine.comm.arena import Arena, Offer

KINDS = ("own", "own-native", "own-exact", "attach", "attach-view")


class _Reductions:
    """Counts what travels in shared memory, and how much of it in memory of ours."""

    def __init__(self) -> None:
        self.num = self.num_in_place = 0
        self._reduce = Arena.reduce

    def __enter__(self) -> Self:
        def reduce(held: Arena, flat: torch.Tensor, **options: Any) -> Any:
            self.num += 1
            self.num_in_place += "memfd:pyengine" in _map_of(flat.data_ptr())
            return self._reduce(held, flat, **options)

        Arena.reduce = reduce  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Arena.reduce = self._reduce  # type: ignore[method-assign]


def _map_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.partition(" ")[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return line
    return ""


def _trained(kind: str, dtype: torch.dtype, **options: Any) -> tuple[int, int]:
    with _Reductions() as seen:
        model = Integers(dtype)
        sync, forward = engine(kind, model, accumulate=2, **{"shared_memory": True, **options})
        windows_of_integers(sync, forward, model)
        sync.close()
    return seen.num, seen.num_in_place


@pytest.mark.parametrize("world", [2, *rest(3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_buckets_travel_in_shared_memory_and_own_ones_lie_there(ranks, world, kind, dtype):
    for num, in_place in ranks(world).run(_trained, kind, dtype):
        assert num >= 2
        if kind in ("own", "own-native", "own-exact"):
            assert in_place == num


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_shared_memory_false_goes_through_the_group(ranks, kind):
    assert ranks(2).run(_trained, kind, torch.float32, shared_memory=False) == [(0, 0)] * 2
    assert ranks(1).run(_trained, kind, torch.float32) == [(0, 0)]


def _narrow(kind: str) -> tuple[int, int]:
    return _trained(kind, torch.float32, wire=pe.wire.BF16())


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_the_memory_of_a_narrow_wire_is_shared(ranks, kind):
    for num, in_place in ranks(2).run(_narrow, kind):
        assert in_place >= 2
        assert num == in_place or kind == "attach"  # which sends used flags, too


def _random_bits(world: int) -> list[torch.Tensor]:
    """Return gradients of random floats, whose sum depends on its order."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    sync = pe.GradSync(model, shared_memory=True)
    torch.manual_seed(1 + me()[0])
    with sync.accumulate():
        sync.backward(model(torch.randn(64, 300)).square().sum(), count=64)
    sync.unscale_()
    # What they are the sum of, in the order of ranks.
    own = [torch.empty(0)] * world
    twin = nn.Linear(300, 300)
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(1 + me()[0])
    twin(torch.randn(64, 300)).square().sum().backward()
    dist.all_gather_object(own, twin.weight.grad)
    total = own[0]
    for part in own[1:]:
        total = total + part
    inverse = torch.tensor(1.0 / (64 * world), dtype=torch.float64).float()
    return [model.weight.grad.clone(), total * inverse]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_have_the_order_of_ranks_and_the_same_bits_on_all(ranks, world):
    found = ranks(world).run(_random_bits, world)
    for got, want in found:
        assert torch.equal(got, found[0][0])
        assert torch.equal(got, want)


def _hooked(wire: pe.wire.Wire) -> tuple[torch.Tensor, torch.Tensor, int, int, bool]:
    """Train by `comm_hook` alone; return the last gradient, the mean of what ranks had in their order, and
    what was reduced, and whether nothing was left of it.
    """
    rank, world = me()
    before = _traces()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
    twin = copy.deepcopy(model)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    state = copy.copy(pe.HookState(wire=wire, shared_memory=True))
    ddp.register_comm_hook(pickle.loads(pickle.dumps(state)), pe.comm_hook)
    torch.manual_seed(1 + rank)
    with _Reductions() as seen:
        for _ in range(3):  # DDP lays its buckets out anew behind the first one
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


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bare_hook_reduces_in_shared_memory_in_the_order_of_ranks_and_leaves_nothing(ranks, world):
    for wire in (pe.wire.FP32(), pe.wire.BF16()):
        found = ranks(world).run(_hooked, wire)
        for grad, mean, num, in_place, is_clean in found:
            assert torch.equal(grad, found[0][0]) and is_clean
            assert (num > 0) == (world > 1)
            if wire == pe.wire.FP32():
                assert torch.equal(grad, mean) and in_place == 0  # they lie in DDP's memory
            else:
                assert in_place == num


def _refused(how: str) -> tuple[list[str], int]:
    """Train where rank 1 cannot share memory; return what was said."""
    rank, _ = me()
    make = Offer.make

    def limited(world: int) -> Offer:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit[1]))
        try:
            return make(world)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    if rank == 1 and how == "no file":
        Offer.make = limited  # type: ignore[method-assign]
    kept = Arena.allocate
    if rank == 1 and how == "no memory":
        Arena.allocate = lambda self, numel, dtype: torch.zeros(numel, dtype=dtype)  # as without any left
    try:
        with warnings.catch_warnings(record=True) as caught, _Reductions() as seen:
            warnings.simplefilter("always")
            model = Integers(torch.float32)
            sync, forward = engine("own", model, accumulate=2, shared_memory=True)
            windows_of_integers(sync, forward, model)
            sync.close()
    finally:
        Offer.make, Arena.allocate = make, kept  # type: ignore[method-assign]
    return [str(each.message) for each in caught if "ranks reduce through" in str(each.message)], seen.num


def test_where_a_rank_can_make_no_file_all_go_through_the_group_and_rank_0_says_why(ranks):
    said = ranks(3).run(_refused, "no file")
    assert [(len(texts), num) for texts, num in said] == [(1, 0), (0, 0), (0, 0)]
    assert "shared_memory=True: 3 ranks reduce through their process group" in said[0][0][0]
    assert "memfd_create: [Errno 27] File too large" in said[0][0][0]


def test_where_a_rank_has_no_memory_to_share_buckets_are_copied(ranks):
    for texts, num in ranks(3).run(_refused, "no memory"):
        assert texts == []
        assert num >= 2


def _traces() -> tuple[int, int, int]:
    """Return how many descriptors, mapped parts and threads of shared memory this process has."""
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


def _left(kind: str, ends: str) -> tuple[Any, ...]:
    before = _traces()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2, shared_memory=True)
    windows_of_integers(sync, forward, model, num=3)  # the order of buckets is another one from the second on
    under_way = _traces()
    if ends == "close":
        sync.close()
    closed = _traces()
    del sync, forward
    if ends == "dropped":
        del model  # whose parameters have views of the buffers
    return before, under_way, closed, _traces()


@pytest.mark.parametrize("ends", ["close", "dropped"])
@pytest.mark.parametrize("kind", ["own", "own-native", "attach"])
def test_nothing_is_left_of_an_engine(ranks, kind, ends):
    for before, under_way, closed, after in ranks(2).run(_left, kind, ends):
        assert under_way > before
        assert after == before
        assert closed[2] == (before[2] if ends == "close" else under_way[2])


def _killed_by_hook() -> str:
    """Kill rank 1 in a reduction of a bare hook; return what the others are told."""
    model = nn.Linear(50, 50)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(pe.HookState(shared_memory=True), pe.comm_hook)
    roll_call.WAIT_S = 0.5
    try:
        for window in range(3):
            if window == 2 and me()[0] == 1:
                Arena.reduce = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
            ddp(torch.ones(1, 50)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [2, *rest(3)])
def test_a_rank_that_is_killed_under_a_bare_hook_is_an_error_that_names_it(ranks, world):
    ends = ranks(world).ends(30, _killed_by_hook)
    assert ends[1].exit_code == -signal.SIGKILL
    for end in [*ends[:1], *ends[2:]]:
        assert not end.is_silent and not end.error
        assert "rank 1" in end.value


def _killed(who: str, stall_after_s: float | None) -> tuple[float, str]:
    rank, _ = me()
    roll_call.WAIT_S = 0.5
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    sync = pe.GradSync(model, shared_memory=True, stall_after_s=stall_after_s, bucket_cap_mb=1e-5)

    def window() -> None:
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 50)).sum())

    window()
    sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    dist.barrier()  # a process that is new imports much in its first step
    reduce = Arena.reduce
    if rank == 1:  # behind the header, with the first bucket

        def die(*args: Any, **options: Any) -> Any:
            reduce(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL if who == "one" else signal.SIGSTOP)

        Arena.reduce = die  # type: ignore[method-assign]
    if who == "one is stopped":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    since = time.monotonic()
    try:
        window()
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    except RuntimeError as error:
        return time.monotonic() - since, str(error)
    finally:
        Arena.reduce = reduce  # type: ignore[method-assign]
    return 0.0, ""


@pytest.mark.slow
@pytest.mark.parametrize("stall_after_s", [None, 1.0])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_killed_in_a_reduction_is_an_error_that_names_it(ranks, world, stall_after_s):
    ends = ranks(world).ends(30, _killed, "one", stall_after_s)
    assert ends[1].exit_code == -signal.SIGKILL
    for end in [*ends[:1], *ends[2:]]:
        assert not end.is_silent and not end.error
        assert "a collective failed: " in end.value[1] and "rank 1" in end.value[1]


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_reduction_is_an_error_behind_the_groups_timeout(ranks):
    ends = ranks(2).ends(30, _killed, "one is stopped", None)
    assert not ends[0].is_silent
    assert "a collective failed: rank 1 of 2 did not answer" in ends[0].value[1]
    assert ends[1].was_stopped


def _all_killed(note: str) -> None:
    """Tell which file the ranks share, then have all of them killed in a window."""
    model = nn.Linear(100, 100)
    sync = pe.GradSync(model, shared_memory=True)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 100)).sum())
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:pyengine" in line:
            Path(note).write_text(line.split()[4])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_of_ranks_that_are_all_killed_nothing_is_left(ranks, tmp_path):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    note = tmp_path / "inode"
    ends = ranks(3).ends(60, _all_killed, str(note))
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 3
    inode = note.read_text()
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if f" {inode} " in _maps(pid)]
    if before:
        assert not [name for name in set(os.listdir("/dev/shm")) - before if "pyengine" in name]


def _maps(folder: Path) -> str:
    try:
        return "\n".join(line for line in (folder / "maps").read_text().splitlines() if "memfd:py" in line)
    except OSError:
        return ""


@contextmanager
def _hosts(what: str, num_hosts: int = 2) -> Iterator[list[Any]]:
    """Let ranks say that they are on several hosts; give what was said to warn of it."""
    rank, _ = me()
    make = Offer.make

    def elsewhere(world: int) -> Any:
        offer = make(world)
        if what == "threads":
            return replace(offer, process=replace(offer.process, pid=1))
        if what == "network":
            return replace(offer, network=f"net:[{rank % num_hosts}]")
        return replace(offer, process=replace(offer.process, space=f"host {rank % num_hosts}"))

    Offer.make = elsewhere
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        Offer.make = make


def _apart(what: str) -> tuple[list[str], int]:
    with _hosts(what, 3) as caught:
        num, _ = _trained("own", torch.float32)
    return [str(each.message) for each in caught if "ranks reduce through" in str(each.message)], num


@pytest.mark.parametrize(
    ("what", "why"), [("processes", "each is of another host"), ("threads", "threads of one process")]
)
def test_where_no_ranks_can_share_all_go_through_the_group_and_rank_0_says_why(ranks, what, why):
    said = ranks(3).run(_apart, what)
    assert [(len(texts), num) for texts, num in said] == [(1, 0), (0, 0), (0, 0)]
    assert why in said[0][0][0]


def _of_two_hosts(kind: str, what: str) -> tuple[list[str], int, int]:
    """Train where ranks are of two hosts, alternately; return what was said, how often the host's ranks
    reduced in memory of theirs, and how often what lies there.
    """
    found = [0, 0]
    with _hosts(what) as caught:
        for dtype, options in ((torch.float32, {}), (torch.bfloat16, {}), (torch.float32, _HIERARCHICAL)):
            if kind == "own-exact" and options:
                continue
            found = [a + b for a, b in zip(found, _trained(kind, dtype, **options), strict=True)]
    return [str(each.message) for each in caught if "ranks reduce through" in str(each.message)], *found


_HIERARCHICAL = {"wire": pe.wire.Hierarchical(mesh=[[0, 2], [1, 3]])}


@pytest.mark.parametrize("kind", ["own", "attach", *rest("own-native", "own-exact", "attach-view")])
def test_ranks_of_several_hosts_share_the_memory_of_each(ranks, kind):
    for texts, num, in_place in ranks(4).run(_of_two_hosts, kind, "network"):
        assert texts == [] and num >= 2
        assert in_place == num or not kind in ("own", "own-native")


def _of_unequal_hosts() -> tuple[int, int]:
    with _hosts("processes"):
        return _trained("own", torch.float32)


def test_hosts_of_unequal_numbers_of_ranks_share_theirs(ranks):
    (first, _), alone, (third, _) = ranks(3).run(_of_unequal_hosts)
    assert first == third >= 2 and alone == (0, 0)


def _sent_across_hosts() -> tuple[int, int]:
    """Return what this rank sends through the process group across hosts, and of how many elements."""
    model = nn.Linear(999, 1)
    sent: list[int] = []
    all_reduce = dist.all_reduce

    def counted(flat: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(flat.numel())
        return all_reduce(flat, *args, **options)

    with _hosts("network"):
        sync = pe.GradSync(model, shared_memory=True)
        dist.all_reduce = counted
        try:
            with sync.accumulate():
                sync.backward(model(torch.full((1, 999), 1.0 + me()[0])).sum(), count=4)
            sync.unscale_()
        finally:
            dist.all_reduce = all_reduce
        assert torch.equal(model.weight.grad, torch.full((1, 999), 10 / 16))
        return max(sent), sync.layout.buckets[0].numel


def test_only_a_part_of_a_bucket_a_rank_crosses_between_hosts(ranks):
    for largest, numel in ranks(4).run(_sent_across_hosts):
        assert largest == numel // 2


def _argument(value: object) -> str:
    try:
        pe.GradSync(nn.Linear(2, 2), shared_memory=value)
    except ValueError as error:
        return str(error)
    return ""


def test_an_argument_that_is_no_bool_and_ranks_that_differ_are_refused(ranks):
    with pytest.raises(ValueError, match="shared_memory=1: need True"):
        pe.HookState(shared_memory=1)
    assert "shared_memory='no': need True" in ranks(1).run(_argument, "no")[0]
    said = ranks(2).run(_differing)
    assert len(set(said)) == 1 and "ranks have different settings" in said[0]


def _on_an_accelerator(owner: str) -> str:
    """Say that the parameters of rank 1 are not on the CPU."""
    real = shared_memory.runs_ahead
    shared_memory.runs_ahead = lambda device: me()[0] == 1
    model = nn.Linear(2, 2)
    try:
        if owner == "own":
            pe.GradSync(model, shared_memory=True)
        elif owner == "hook":
            ddp = nn.parallel.DistributedDataParallel(model)
            ddp.register_comm_hook(pe.HookState(shared_memory=True), pe.comm_hook)
            ddp(torch.ones(1, 2)).sum().backward()
        else:
            pe.attach(nn.parallel.DistributedDataParallel(model), shared_memory=True)
    except ValueError as error:
        return str(error)
    finally:
        shared_memory.runs_ahead = real
    return ""


@pytest.mark.parametrize("owner", ["own", "attach", "hook"])
def test_memory_of_an_accelerator_is_refused_on_every_rank(ranks, owner):
    for text in ranks(2).run(_on_an_accelerator, owner):
        assert text.startswith("rank 1: shared_memory=True, and parameters lie on cpu")


def _differing() -> str:
    return _argument(me()[0] == 0)
