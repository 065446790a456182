"""Transports over torch.distributed: gloo, NCCL, or any other backend of a process group.

[Note: small reductions]
gloo's own all-reduce is a ring: each rank sends up to 4 (W - 1) messages, one after another, however small
the tensor is. For a header of 24 numbers on 32 ranks, each rank sends 46 messages, and each message may have
to wake up a thread. To avoid this cost, host vectors of at most `_MAX_SMALL_BYTES` (headers, agreements,
flags, the buckets of small models) are reduced differently:

- Two ranks swap their vectors in one all-gather, and each rank reduces both vectors (`SwapWork`), which takes
  1 message per rank instead of 4.
- Three or more ranks reduce over a tree of point-to-point operations (`PointToPoint.all_reduce`), which takes
  2 messages per rank on average. A rank sends its vector to up to `_FAN_OUT` + 1 other ranks, so larger
  vectors use the ring. Operations are matched by tag, so other collectives of the group may run in between in
  any order.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import queue
import secrets
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pyengine.comm.base import (
    Comm,
    Hosts,
    Levels,
    Local,
    Unbroken,
    Work,
    by_dtype,
    ring_bytes,
)
from pyengine.comm.groups import (
    GroupHandle,
    group_of_hosts,
    group_or_default,
    has_gloo,
    make,
    name_of_backend,
    ranks_of,
)
from pyengine.comm.watch import StallWatch, StoreRollCall, failure
from pyengine.ops.capture import is_capturing
from pyengine.ops.device import HOST, runs_ahead

_log = logging.getLogger("pyengine.comm")

# Backends whose collectives the host waits for, on any device; for all other backends the stream waits.
_HOST_ORDERED = {"gloo", "mpi"}
# Broadcasts are split into pieces, as in DDP. A piece is large enough to be efficient on any network, and
# small enough to avoid a copy of the whole model.
_PIECE_BYTES = 256 * 2**20
_TAG = 0x70796567  # A tag that no other code uses; operations with the same tag are matched in posting order.
# The tags of tree reductions: the first tag, and the number of tags after which the first tag is reused.
_TREE_TAG, _NUM_TREE_TAGS = 0x71000000, 2**20
# See [Note: small reductions].
_MAX_SMALL_BYTES, _FAN_OUT = 32 * 2**10, 4
_COMBINE: dict[dist.ReduceOp.RedOpType, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BOR: torch.bitwise_or,
}
# torch 2.13 renamed `dist.all_gather_into_tensor` to `all_gather_single`.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Work(Work):
    """A collective in progress, whose error names the ranks that do not respond."""

    def __init__(
        self, work: dist.Work | P2PWork | SwapWork, roll_call: StoreRollCall, watch: StallWatch | None
    ) -> None:
        self._work, self._roll_call, self._watch = work, roll_call, watch

    def break_off(self, error: BaseException) -> None:
        self._roll_call.break_off(error)

    def wait(self) -> None:
        with self._roll_call.named():
            if self._watch is None:
                self._work.wait()
            else:
                self._watch.wait(self._work)

    def get_future(self) -> Future[Any]:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class SideStream:
    """A stream that runs after the current stream, and waits for other ranks without stalling that stream."""

    def __init__(self, device: torch.device) -> None:
        # The stream has high priority, because its kernels fill the buckets that collectives wait for. These
        # kernels must not queue behind the kernels of the backward.
        self._stream = torch.Stream(device, priority=-1)
        self._device = device

    @contextmanager
    def run(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for tensor in tensors:
            for dense in (
                [tensor] if tensor.layout is torch.strided else [tensor._indices(), tensor._values()]
            ):
                dense.record_stream(self._stream)
        with self._stream:
            yield


class TorchDist(Comm):
    """A transport over one process group for tensors on one device.

    `group=None` means the default group. A group that an engine has created is passed as a `GroupHandle`,
    which all transports over this group share.
    """

    can_exchange = True
    roll_call: StoreRollCall

    def __init__(self, group: dist.ProcessGroup | GroupHandle | None, device: torch.device) -> None:
        handle = group if isinstance(group, GroupHandle) else GroupHandle(group, device)
        group = handle.get()
        super().__init__(rank=dist.get_rank(group), world_size=dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError("process_group: this process is not a member; pass a group that contains it")
        self.handle, self.ranks = handle, handle.ranks
        self.roll_call = StoreRollCall(group)
        self.device, self.backend = device, name_of_backend(group, device)
        self.is_stream_ordered = runs_ahead(device) and self.backend not in _HOST_ORDERED
        # The device to which host values are copied before they are sent. A stream-ordered backend can send
        # only device memory.
        self._device_of_values = device if self.is_stream_ordered else HOST
        self._side_stream = SideStream(device) if self.is_stream_ordered else None
        self.can_or = is_gloo = not runs_ahead(device) and self.backend == "gloo"
        self._point_to_point = PointToPoint(self.handle) if is_gloo else None
        self._num_names = 0  # number of groups created and named by this transport

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.handle.get()

    # ---- related transports ----

    def with_own_group(self) -> Comm:
        """Return a transport over a new group that only this engine uses.

        If this transport is stream-ordered or has a single rank, the result is this transport. See [Note: an
        engine's own group] in groups.py.

        Cost: a process group and an all-reduce of 8 bytes, and a second all-reduce if `engine_id` is not set
        yet.
        """
        if self.world_size == 1 or self.is_stream_ordered:
            return self
        own = self._over(self.ranks, f"buckets of engine {self._new_name()}", self.backend)
        own.max_of(0)  # connects all ranks, even if another rank is about to release its group handle
        return own

    def between_hosts(self) -> Comm | None:
        """Return a transport over gloo for tensors on the host, or None.

        With one rank, return `Local`. Return None if this transport is not stream-ordered, and therefore
        needs no other transport, or if the group has no gloo backend.

        Cost: a process group, unless an earlier engine over the same group has already created this gloo
        group.
        """
        if self.world_size == 1:
            return Local()
        if not (self.is_stream_ordered and has_gloo(self.group)):
            return None
        handle = GroupHandle(group_of_hosts(self.group), HOST, leader=self.handle)
        hosts = TorchDist(handle, HOST)
        hosts.join(self)
        return hosts

    def split(self, hosts: Hosts) -> Levels:
        """Return transports within a host and across hosts, which are released together with this transport.

        `hosts` lists the ranks of this transport by host; hosts may have different numbers of ranks.
        """
        mine = next(host for host in hosts if self.rank in host)
        index, num_parts = mine.index(self.rank), min(map(len, hosts))
        across = [host[index] for host in hosts] if index < num_parts else [self.rank]
        purpose = f"levels of engine {self._new_name()}"
        return Levels(self._part(mine, purpose), self._part(across, purpose), num_parts)

    def _part(self, ranks: Sequence[int], purpose: str) -> Comm:
        """Return a transport over some of the ranks of this transport."""
        if len(ranks) == self.world_size:
            return self
        if len(ranks) > 1:
            return self._over([self.ranks[rank] for rank in ranks], purpose)
        alone = Local()
        alone.join(self)
        return alone

    def _over(self, ranks: Sequence[int], purpose: str, backend: str | None = None) -> TorchDist:
        """Return a transport over a new group, which is destroyed when this transport is released."""
        group = make(purpose, ranks, timeout=self.handle.timeout(), backend=backend)
        made = TorchDist(GroupHandle(group, self.device, is_own=True, leader=self.handle), self.device)
        made.join(self)
        return made

    def _new_name(self) -> str:
        """Return a unique group name, which is equal on every rank."""
        self._num_names += 1
        number = self.max_of(secrets.randbits(62))[0] if self.engine_id is None else self.engine_id
        return f"{number:x}.{self._num_names}"

    def release(self) -> None:
        super().release()
        if self._point_to_point is not None:
            self._point_to_point.close()
        self.handle.release()

    # ---- waiting ----

    def watch_stalls(self, after_s: float) -> None:
        if self.world_size > 1:
            self.roll_call.watch = StallWatch(self.roll_call.store, dist.get_rank(), self.ranks, after_s)

    def side_stream(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        return nullcontext() if self._side_stream is None else self._side_stream.run(tensors)

    def run(
        self, launch: Callable[[bool], dist.Work | None], what: str, group: dist.ProcessGroup | None = None
    ) -> None:
        """Run a collective and wait for it; an error names the ranks that did not join."""
        watch, host_watch = self.roll_call.watch, self._host_watch
        ranks = self.ranks if group is None else ranks_of(group, what)
        _log.debug("launch %s over ranks %s, and wait", what, ranks)
        noted = nullcontext() if watch is None else watch.pending.running(ranks, what)
        with self._launching(), noted:
            work = launch(host_watch is not None)
            if host_watch is not None and work is not None:
                host_watch.wait(work)

    @property
    def _host_watch(self) -> StallWatch | None:
        """The stall watch that can interrupt the host's wait, or None if the host does not wait."""
        return None if self.is_stream_ordered else self.roll_call.watch

    def _launching(self) -> AbstractContextManager[None]:
        self.handle.apply_timeout()
        return self.roll_call.named()

    def _launched(self, work: dist.Work | P2PWork | SwapWork, what: str) -> _Work:
        _log.debug("launch %s over ranks %s", what, self.ranks)
        if self.roll_call.watch is not None and not is_capturing():  # captured work cannot be queried
            self.roll_call.watch.pending.add(self.ranks, what, work.is_completed)
        return _Work(work, self.roll_call, self._host_watch)

    # ---- collectives ----

    def all_reduce(self, flat: Tensor) -> Work:
        return self._all_reduce(flat, dist.ReduceOp.SUM)

    def all_reduce_max(self, flat: Tensor) -> Work:
        return self._all_reduce(flat, dist.ReduceOp.MAX)

    def all_reduce_or(self, flat: Tensor) -> Work:
        return self._all_reduce(flat, dist.ReduceOp.BOR)

    def _all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        return self._reduce_over_group(flat, op, f"an all-reduce of {flat.nbytes} bytes")

    def _reduce_over_group(self, flat: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> _Work:
        """Launch a reduction; for small vectors over gloo see [Note: small reductions]."""
        small = self._point_to_point if flat.nbytes <= _MAX_SMALL_BYTES and self.world_size > 1 else None
        num_bytes = flat.nbytes
        self.traffic.count(
            ring_bytes(num_bytes, self.world_size) if small is None else small.num_neighbors * num_bytes
        )
        with self._launching():
            work: dist.Work | P2PWork | SwapWork
            if small is None:
                work = dist.all_reduce(flat, op, group=self.group, async_op=True)
            elif self.world_size == 2:
                work = SwapWork(flat, op, self.group)
            else:
                work = small.all_reduce(flat, op)
        return self._launched(work, what)

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

    def max_of(self, *values: int) -> list[int]:
        flat = torch.tensor(values, dtype=torch.int64, device=self._device_of_values)
        what = f"an agreement on {flat.nbytes} bytes"
        with Unbroken(self):
            self._reduce_over_group(flat, dist.ReduceOp.MAX, what).wait()
        return flat.tolist()

    def all_gather_object(self, value: object) -> list[Any]:
        return self.all_gather_objects([value])[0][0]

    def all_gather_objects(
        self, values: Sequence[object], *numbers: int
    ) -> tuple[list[list[Any]], list[int]]:
        """Gather each value from all ranks, and return the maximum of each number over all ranks.

        The caller must not change the gathered values.

        Cost: an all-reduce of 40 bytes per value and 8 bytes per number. The all-reduce compares hashes,
        because the values are usually equal on all ranks. Each value that differs between ranks also needs an
        all-gather of pickles, which are padded to the longest pickle.
        """
        if self.world_size == 1:
            return [[value] for value in values], [*numbers]
        pickles = [pickle.dumps(value) for value in values]
        words = [
            word
            for data in pickles
            for word in struct.unpack("<qq", hashlib.blake2b(data, digest_size=16).digest())
        ]
        gathered = []
        with Unbroken(self):
            most = self.max_of(*words, *(~word for word in words), *map(len, pickles), *numbers)
            highest, lowest = most[: len(words)], [~word for word in most[len(words) : 2 * len(words)]]
            lengths = most[2 * len(words) : 2 * len(words) + len(pickles)]
            for index, value in enumerate(values):
                mine = slice(2 * index, 2 * index + 2)
                are_equal = highest[mine] == lowest[mine]
                gathered.append(
                    [value] * self.world_size
                    if are_equal
                    else self._gather_pickles(pickles[index], lengths[index])
                )
        return gathered, most[len(most) - len(numbers) :]

    def _gather_pickles(self, data: bytes, longest: int) -> list[Any]:
        """Gather one pickle from each rank, padded to `longest` bytes; unpickling ignores the padding.

        `dist.all_gather_object` is not used, because the stall watch cannot interrupt it.
        """
        self.traffic.count((self.world_size - 1) * longest)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        mine = padded.to(self._device_of_values)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        self.run(
            lambda is_async: dist.all_gather(rows, mine, group=self.group, async_op=is_async),
            "a gather of objects",
        )
        return [pickle.loads(row.cpu().numpy().tobytes()) for row in rows]  # noqa: S301 - SECURITY.md

    def broadcast_(self, tensors: list[Tensor]) -> None:
        with Unbroken(self):
            for piece in _pieces(tensors):
                self._broadcast_piece_(piece)

    def _broadcast_piece_(self, piece: list[Tensor]) -> None:
        """Broadcast tensors of one dtype in one collective; a single contiguous tensor is not copied.

        Tensors are sent as bytes, because no backend supports all dtypes (for example float8 and uint16).
        """
        is_view = len(piece) == 1 and piece[0].is_contiguous()
        flat = _bytes_of(piece[0]) if is_view else torch.cat([_bytes_of(tensor) for tensor in piece])
        self.traffic.count(flat.nbytes if self.world_size > 1 else 0)
        self.run(
            lambda is_async: dist.broadcast(flat, group=self.group, group_src=0, async_op=is_async),
            f"a broadcast of {flat.nbytes} bytes",
        )
        if not is_view:
            for tensor, part in zip(piece, flat.split([t.nbytes for t in piece]), strict=True):
                tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 of shape `[nbytes]`; a view if the tensor is contiguous."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors into lists of one dtype and at most `_PIECE_BYTES`; a larger tensor gets its own list."""
    for same_dtype in by_dtype(tensors):
        piece, num_bytes = [same_dtype[0]], same_dtype[0].nbytes
        for tensor in same_dtype[1:]:
            num_bytes += tensor.nbytes
            if num_bytes > _PIECE_BYTES:
                yield piece
                piece, num_bytes = [], tensor.nbytes
            piece.append(tensor)
        yield piece


# ---- exchanges and small reductions over gloo ----


class SwapWork:
    """A reduction over two ranks, which send each other their vectors; see [Note: small reductions].

    The result is available after `wait`, or when the future has completed.
    """

    def __init__(self, flat: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
        self._flat, self._op = flat, op
        self._rows = [torch.empty_like(flat), torch.empty_like(flat)]
        self._is_reduced = False
        self._lock = threading.Lock()  # The future completes on a gloo thread.
        # Bypass `dist.all_gather`, whose argument checks are not needed here.
        self._work = group_or_default(group).allgather([self._rows], [flat])

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._reduce()
        return True

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done

    def get_future(self) -> Future[Any]:
        future: Future[Any] = self._work.get_future().then(self._reduce_behind)
        return future

    def _reduce_behind(self, gathered: Future[Any]) -> None:
        gathered.value()  # this raises the error of a failed collective
        self._reduce()

    def _reduce(self) -> None:
        with self._lock:
            if not self._is_reduced:
                first, second = self._rows  # The rows are in rank order.
                with torch.inference_mode():  # The caller may be in inference mode.
                    _COMBINE[self._op](first, second, out=self._flat)
                self._is_reduced = True


# An iterator that posts and yields the point-to-point operations of each step. It is advanced when all
# operations of the previous step have completed.
Steps = Iterator[Sequence[dist.Work | None]]


class P2PWork:
    """Point-to-point operations combined into one work, whose `wait` may time out.

    A gloo work itself must not time out in `wait`, because a timeout closes the connection.

    Args:
        works: operations of the first step, which have been posted.
        steps: operations of the subsequent steps.
        timeout: timeout of each operation. gloo itself would use the timeout that was set when its group
            was created.
    """

    def __init__(self, works: Sequence[dist.Work | None], steps: Steps, timeout: timedelta) -> None:
        self._works, self._steps, self._timeout = works, steps, timeout
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._future: Future[Any] = Future()

    def run(self) -> None:
        """Run all steps, on the transfer thread; the first error is reported immediately."""
        works: Sequence[dist.Work | None] | None = self._works
        self._works = ()
        try:
            while works is not None:
                for work in works:
                    try:
                        if work is not None and work.wait(self._timeout) is False:
                            raise RuntimeError("a point-to-point operation was aborted")
                    except Exception as error:  # noqa: BLE001 - raised by `wait`
                        self._end(error)
                works = None if self._error is not None else next(self._steps, None)
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._end(error)
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._is_over.is_set():  # an earlier operation has failed
            return
        self._error = error
        self._is_over.set()
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def get_future(self) -> Future[Any]:
        return self._future


class PointToPoint:
    """Exchanges and small reductions among the ranks of one gloo group, by point-to-point operations.

    In gloo's own all-to-all and all-gather, a rank sends before it receives. A late rank therefore sends its
    data first, and then, over the same connection, the notification that it can receive. The other rank sends
    nothing until all of this data has arrived, so the link carries data in one direction at a time, at half
    its rate. Point-to-point operations avoid this, because every rank gets ready to receive before it sends.

    Cost: a thread that waits for operations in launch order; the first operation starts it. The thread ends
    when `close` is called, when this object is freed, or when the interpreter exits; each of these waits at
    most a second for the thread.
    """

    def __init__(self, handle: GroupHandle) -> None:
        self._handle, self._ranks = handle, handle.ranks
        self._rank = dist.get_rank(handle.get())
        self._waiting: queue.SimpleQueue[P2PWork | None] = queue.SimpleQueue()
        self._close: Callable[[], object] | None = None
        # The reason why no further operation may be posted; empty if operations may be posted.
        self._broken = ""
        # In the tree, rank r has the children r * fan-out + 1, r * fan-out + 2, ...
        first = self._rank * _FAN_OUT + 1
        self._children = [*self._ranks[first : first + _FAN_OUT]]
        self._parent = None if self._rank == 0 else self._ranks[(self._rank - 1) // _FAN_OUT]
        # The number of ranks to which this rank sends its vector or the result in `all_reduce`.
        self.num_neighbors = len(self._children) + (self._parent is not None)

    def all_to_all(self, received: Tensor, parts: Tensor) -> P2PWork:
        return self._launch(self._exchange(self._rows(received), self._rows(parts)))

    def all_gather(self, gathered: Tensor, part: Tensor) -> P2PWork:
        return self._launch(self._exchange(self._rows(gathered), [part] * len(self._ranks)))

    def all_reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> P2PWork:
        """Reduce over a tree, in place; see [Note: small reductions].

        Every rank gets the same bits, and the result for an element does not depend on its position in
        `flat`.

        Cost: this rank sends the bytes of `flat` to each of `num_neighbors` ranks.
        """
        return self._launch(self._reduce(flat, op))

    def close(self) -> None:
        """End the thread after its pending operations."""
        if self._close is not None:
            self._close()
        self._close = None

    def _rows(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.view(len(self._ranks), -1).unbind()

    def _launch(self, steps: Steps) -> P2PWork:
        """Post the first step; the thread runs the remaining steps."""
        if self._broken:
            raise RuntimeError(failure(self._broken))
        timeout = self._handle.timeout()  # Raises an error if the group has been destroyed.
        # If a receive were not posted, later operations would be matched with the wrong operations.
        self._broken = "this rank was interrupted while it posted an exchange"
        try:
            works = next(steps)
        except Exception as error:
            self._broken = f"this rank could not post an earlier exchange ({error})"
            raise
        self._broken = ""
        made = P2PWork(works, steps, timeout)
        if self._close is None:
            thread = threading.Thread(
                target=_run_all, args=(self._waiting,), name="pyengine-transfers", daemon=True
            )
            self._close = weakref.finalize(self, _end, self._waiting, thread)
            thread.start()
        self._waiting.put(made)
        return made

    def _exchange(self, arriving: Sequence[Tensor], leaving: Sequence[Tensor]) -> Steps:
        num = len(self._ranks)
        others = [(self._rank + step) % num for step in range(1, num)]  # each rank has a different order
        group = self._handle.get()
        works = [dist.irecv(arriving[r], self._ranks[r], group, _TAG) for r in reversed(others)]
        works += [dist.isend(leaving[r], self._ranks[r], group, _TAG) for r in others]
        if arriving[self._rank].data_ptr() != leaving[self._rank].data_ptr():
            arriving[self._rank].copy_(leaving[self._rank])
        yield works

    def _reduce(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> Steps:
        group = group_or_default(self._handle.get())
        _launched_in[group] = number = _launched_in.get(group, 0) + 1
        tag = _TREE_TAG + number % _NUM_TREE_TAGS
        rows, result = flat.new_empty(len(self._children), *flat.shape), torch.empty_like(flat)
        from_children = [
            dist.irecv(row, child, group, tag)
            for row, child in zip(rows.unbind(), self._children, strict=True)
        ]
        answer = None if self._parent is None else dist.irecv(result, self._parent, group, tag)
        if from_children:
            yield from_children
            with torch.inference_mode():  # the launching thread may be in inference mode
                for row in rows:
                    _COMBINE[op](flat, row, out=flat)
        if self._parent is not None:
            yield [dist.isend(flat, self._parent, group, tag), answer]
            with torch.inference_mode():
                flat.copy_(result)
        yield [dist.isend(flat, child, group, tag) for child in self._children]


# The number of tree reductions that this rank has launched, by group. The number is equal on every rank, and
# determines the tag of the next reduction.
_launched_in: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _run_all(waiting: queue.SimpleQueue[P2PWork | None]) -> None:
    while (work := waiting.get()) is not None:
        work.run()


def _end(waiting: queue.SimpleQueue[P2PWork | None], thread: threading.Thread) -> None:
    waiting.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)
