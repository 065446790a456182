"""torch.distributed as a transport: gloo, NCCL, or whatever backend the group has for the tensors' device."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.base import Comm, Hosts, Levels, Work, by_dtype, ring_bytes
from pyengine.comm.exclusive import Usage, offer, take, usage_of
from pyengine.comm.groups import (
    give_up_after,
    group_of_hosts,
    group_within,
    has_gloo,
    name_of_backend,
    timeout_of,
)
from pyengine.comm.levels import by_host, check_equal, given, own_host
from pyengine.comm.local import Local
from pyengine.comm.roll_call import RollCall, StoreRollCall
from pyengine.comm.side_stream import SideStream
from pyengine.comm.stall import StallWatch
from pyengine.comm.transfers import PointToPoint, Transfers
from pyengine.ops.device import HOST, as_current, runs_ahead

# Backends that the host waits for, whatever device the tensors lie on; of all others the stream waits.
_HOST_ORDERED = {"gloo", "mpi"}
# As DDP: large enough for any network, and no second copy of the model.
_PIECE_BYTES = 256 * 2**20
# As torch calls it since 2.13, and before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Work:
    """A collective under way, whose failure names ranks."""

    def __init__(self, work: dist.Work | Transfers, roll_call: RollCall, watch: StallWatch | None) -> None:
        self._work, self._roll_call, self._watch = work, roll_call, watch

    def break_off(self, error: Exception) -> None:
        self._roll_call.break_off(error)

    def wait(self) -> None:
        with self._roll_call.named():
            if self._watch is None:
                self._work.wait()
            else:
                self._watch.wait(self._work)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class TorchDist(Comm):
    """Collectives of one process group.

    Args:
        group: the group; None is the default group.
        device: where the tensors lie.

    Attributes:
        device: as given.
    """

    can_exchange = True
    roll_call: StoreRollCall

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(rank=dist.get_rank(group), world_size=dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError("group: this process is not a member; pass a group that contains it")
        self._find_group = self._follows = _finding(group)
        self._levels: dict[Hosts | None, Levels] = {}
        self.roll_call = StoreRollCall(group)
        self._usage = usage_of(group)  # where the group is an engine's own
        self._keep(self._usage)
        self._follows_limit = False  # for a group of ours that several engines use
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.device, self.backend = device, name_of_backend(group, device)
        self.is_stream_ordered = runs_ahead(device) and self.backend not in _HOST_ORDERED
        self._side_stream = SideStream(device) if self.is_stream_ordered else None
        is_gloo = not runs_ahead(device) and self.backend == "gloo"
        self._point_to_point = PointToPoint(self._find_group, self.ranks) if is_gloo else None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None is the default group."""
        return self._find_group()

    def with_own_group(self) -> Comm:
        """Return a transport over a process group that no other code uses, where the host waits.

        gloo ends a process whose collective meets one of another size.

        Cost: a gather of objects; and a process group, unless an earlier engine has left one.
        """
        if self.world_size == 1 or self.is_stream_ordered:
            return self
        offers = self.all_gather_object(offer(self.ranks, self.backend))
        own = TorchDist(take(self.ranks, self.backend, offers, self.limit()), self.device)
        own.join(self)
        return own

    def between_hosts(self) -> Comm | None:
        """Return a transport over gloo; None where the host waits for collectives anyway, or where this group
        has no gloo for the CPU.

        Cost: a process group, unless an earlier engine over this one has left it.
        """
        if self.world_size == 1:
            return Local()
        if not (self.is_stream_ordered and has_gloo(self.group)):
            return None
        hosts = TorchDist(group_of_hosts(self.group), HOST)
        hosts.join(self)
        hosts._follows, hosts._follows_limit = self._find_group, True
        return hosts

    def watch_stalls(self, after_s: float) -> None:
        if self.world_size > 1:
            self.roll_call.watch = StallWatch(self.roll_call.store, dist.get_rank(), self.ranks, after_s)

    def report_position(self, position: Callable[[], str]) -> None:
        if self.roll_call.watch is not None:
            self.roll_call.watch.position = position

    def join(self, other: Comm) -> None:
        super().join(other)
        if isinstance(other, TorchDist):
            self._follows = other._follows
            if other._kept is not None:
                self._keep(other._kept)

    def release(self) -> None:
        super().release()
        self._levels = {}
        if self._point_to_point is not None:
            self._point_to_point.close()
        if self.roll_call.watch is not None:
            self.roll_call.watch.close()
            self.roll_call.watch = None
        if self._kept is not None:
            self._kept.users.discard(self)

    def levels(self, hosts: Hosts | None = None) -> Levels:
        if hosts not in self._levels:
            if hosts is None:
                found = by_host(self.all_gather_object(own_host()))
            else:
                found = given(hosts, self.ranks)
            check_equal(found)
            self._levels[hosts] = self.cut(found)
        return self._levels[hosts]

    def cut(self, hosts: Hosts) -> Levels:
        """Return transports within a host and across hosts, whose end is the end of this one.

        Args:
            hosts: ranks of this transport; hosts may have unequal numbers of them.
        """
        mine = next(host for host in hosts if self.rank in host)
        place, num_places = mine.index(self.rank), min(map(len, hosts))
        there = [host[place] for host in hosts] if place < num_places else [self.rank]
        is_even = len({len(host) for host in hosts}) == 1
        # In this order on all ranks of each.
        inside, across = self._part(mine, alone=not is_even), self._part(there, alone=not is_even)
        return Levels(inside, across, num_places)

    def _part(self, ranks: Sequence[int], *, alone: bool) -> Comm:
        """Return a transport over some of the ranks.

        Args:
            ranks: of this transport.
            alone: whether to make a process group for one rank, too: torch names groups that the user makes
                by how many a rank has (`dist.new_group(use_local_synchronization=True)`), so all ranks are
                to have equally many.
        """
        if len(ranks) == self.world_size:
            return self
        members = [self.ranks[rank] for rank in ranks]
        group = group_within(members, self._name(), self.limit()) if alone or len(ranks) > 1 else None
        comm = Local() if len(ranks) == 1 else TorchDist(group, self.device)
        comm.join(self)
        return comm

    def _name(self) -> str:
        """Return what the levels of this transport are told by from those of others."""
        return f"ranks {[*self.ranks]}" + ("" if self._usage is None else f", {self._usage.name}")

    def run(
        self, launch: Callable[[bool], dist.Work | None], what: str, group: dist.ProcessGroup | None = None
    ) -> None:
        """Run a collective and wait for it; the error names the ranks that did not come."""
        watch, host_watch = self.roll_call.watch, self._host_watch
        try:
            ranks = self.ranks if group is None else tuple(dist.get_process_group_ranks(group))
        except KeyError:
            raise RuntimeError(
                f"set up the process group, the model over it and the engine anew: {what} was to run in a "
                "process group that has been destroyed (destroy_process_group)"
            ) from None
        noted = nullcontext() if watch is None else watch.pending.running(ranks, what)
        with self._launching(), noted:
            work = launch(host_watch is not None)
            if host_watch is not None and work is not None:
                host_watch.wait(work)

    @contextmanager
    def side_stream(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the body work on a side stream where waiting is a stream's; elsewhere right here."""
        if self._side_stream is None:
            yield
        else:
            with self._side_stream.run(tensors):
                yield

    def all_reduce(self, flat: Tensor) -> Work:
        return self._all_reduce(flat, dist.ReduceOp.SUM)

    def all_reduce_max(self, flat: Tensor) -> Work:
        return self._all_reduce(flat, dist.ReduceOp.MAX)

    def all_to_all(self, received: Tensor, parts: Tensor) -> Work:
        self.traffic.count(parts.nbytes - parts.nbytes // self.world_size)
        with self._launching():
            if self._point_to_point is not None:
                work = self._point_to_point.all_to_all(received, parts)
            else:
                work = dist.all_to_all_single(received, parts, group=self.group, async_op=True)
        return self._launched(work, f"an all-to-all of {parts.nbytes} bytes")

    def all_gather(self, gathered: Tensor, part: Tensor) -> Work:
        self.traffic.count(gathered.nbytes - part.nbytes)
        with self._launching():
            if self._point_to_point is not None:
                work = self._point_to_point.all_gather(gathered, part)
            else:
                work = _all_gather_single(gathered, part, group=self.group, async_op=True)
        return self._launched(work, f"an all-gather of {gathered.nbytes} bytes")

    def all_gather_object(self, value: object) -> list[Any]:
        if self._host_watch is not None:
            return self._gathered(value)
        values: list[Any] = [None] * self.world_size
        with as_current(self.device), self.roll_call.named():  # through whose memory NCCL sends objects
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Send a quarter of a gigabyte of one dtype at a time."""
        with as_current(self.device):
            for piece in _pieces(tensors):
                self._broadcast_(piece)

    @property
    def _host_watch(self) -> StallWatch | None:
        """What ends the host's own waiting; None where a stream waits, or nobody watches."""
        return None if self.is_stream_ordered else self.roll_call.watch

    def _gathered(self, value: object) -> list[Any]:
        """Gather as torch's `all_gather_object` does, in two collectives that need not be waited for in
        vain.
        """
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [
            int(size) for size in self._gather(torch.tensor([mine.numel()], dtype=torch.int64, device=HOST))
        ]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=HOST)
        padded[: mine.numel()] = mine
        rows = self._gather(padded)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor of one shape, on the CPU, by rank."""
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        self.run(
            lambda is_async: dist.all_gather(rows, mine, group=self.group, async_op=is_async),
            "a gather of objects",
        )
        return rows

    def _broadcast_(self, piece: list[Tensor]) -> None:
        """Overwrite tensors of one dtype by one collective; a tensor alone needs no memory of ours.

        They are sent as bytes: no backend knows all dtypes (float8, uint16).
        """
        if len(piece) == 1 and piece[0].is_contiguous():
            self._send(_bytes_of(piece[0]))
            return
        flat = torch.cat([_bytes_of(tensor) for tensor in piece])
        self._send(flat)
        for tensor, part in zip(piece, flat.split([t.nbytes for t in piece]), strict=True):
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))

    def _send(self, flat: Tensor) -> None:
        """Overwrite a tensor with rank 0's."""
        self.run(
            lambda is_async: dist.broadcast(flat, group=self.group, group_src=0, async_op=is_async),
            f"a broadcast of {flat.nbytes} bytes",
        )

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        self.traffic.count(ring_bytes(flat.nbytes, self.world_size))
        with self._launching():
            work = dist.all_reduce(flat, op, group=self.group, async_op=True)
        return self._launched(work, f"an all-reduce of {flat.nbytes} bytes")

    def _keep(self, usage: Usage | None) -> None:
        """Keep a group for the engine, as long as this transport of its is used."""
        self._kept = self.roll_call.usage = usage
        if usage is not None:
            usage.users.add(self)

    def limit(self) -> timedelta:
        """Return after how long collectives here are given up: what the engine's own group has, which may be
        set at any time.
        """
        return timeout_of(self._follows(), self.device)

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Note a collective, which the body starts, and name who is missing if that raises."""
        if self._kept is not None or self._follows_limit:
            group = self.group  # which is gone if the default one is
            if (limit := self.limit()) != timeout_of(group, self.device):
                give_up_after(limit, group)
        if self._usage is not None:
            self._usage.launched += 1
        with self.roll_call.named():
            yield

    def _launched(self, work: dist.Work | Transfers, what: str) -> _Work:
        if self.roll_call.watch is not None:
            self.roll_call.watch.pending.add(self.ranks, what, work.is_completed)
        return _Work(work, self.roll_call, self._host_watch)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, uint8 [nbytes]; in its memory where it is contiguous."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut tensors into lists of one dtype and at most `_PIECE_BYTES` together, or of one larger tensor."""
    for alike in by_dtype(tensors):
        piece, num_bytes = [alike[0]], alike[0].nbytes
        for tensor in alike[1:]:
            num_bytes += tensor.nbytes
            if num_bytes > _PIECE_BYTES:
                yield piece
                piece, num_bytes = [], tensor.nbytes
            piece.append(tensor)
        yield piece


def _finding(group: dist.ProcessGroup | None) -> Callable[[], dist.ProcessGroup | None]:
    """Return what returns a group as long as torch has it: who holds a group beyond its end keeps its
    threads.
    """
    if group is None:
        return lambda: None
    known, ranks = weakref.ref(group), dist.get_process_group_ranks(group)

    def find() -> dist.ProcessGroup:
        found = known()
        if found is None:
            raise RuntimeError(
                f"the process group of ranks {ranks} has been destroyed, and an engine over it is to be "
                "used: make the engine anew"
            )
        return found

    return find
