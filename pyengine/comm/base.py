"""The interface of transports: the collectives that the engine and its communication formats may call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.comm.process_state import ProcessId, own_network
from pyengine.comm.watch import RollCall

T = TypeVar("T", bound=Tensor)

# The ranks of each host. A "host" may be any set of ranks with a fast network between them.
Hosts = tuple[tuple[int, ...], ...]


@dataclass
class Traffic:
    """The counters of one transport: collectives launched, and the bytes that this rank sends for them."""

    collectives: int = 0
    # The bytes that this rank would send in a ring, where each rank also forwards broadcasts. For small
    # reductions over gloo, the bytes that are actually sent are counted.
    bytes_sent: int = 0

    def count(self, num_bytes: int) -> None:
        self.collectives += 1
        self.bytes_sent += num_bytes


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Return the number of bytes that each rank sends in a ring all-reduce of `num_bytes`.

    With W ranks, this is 2 (W - 1) / W times `num_bytes`.
    """
    return 2 * (world_size - 1) * num_bytes // world_size


def by_dtype(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors by dtype, keeping their order, because a collective or a kernel needs a single dtype."""
    found: dict[torch.dtype, list[T]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return [*found.values()]


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> object:
        """Block until the result is available; on an accelerator, the current stream waits instead."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes together with the collective. By default, raise RuntimeError."""
        raise RuntimeError(f"a {type(self).__name__} has no future: call wait() instead")

    def is_completed(self) -> bool:
        """Whether `wait` would return without blocking; True by default."""
        return True


class Done(Work):
    """A collective that was complete when it was launched; its future has the value `[result]`."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._result])
        return future


class Comm(ABC):
    """Base class of transports, which run collectives among the ranks of a group.

    `comm_for` creates a transport. A transport implements `all_reduce`, `all_reduce_max`, `all_gather_object`
    and `broadcast_`. All other methods and attributes have defaults.

    Args:
        rank: index of this rank in the group.
        world_size: number of ranks in the group.

    Attributes:
        rank, world_size: see Args.
        ranks: all ranks of the group, numbered as in the default group.
        backend: name of the backend, for example "nccl"; empty if there is no backend.
        is_stream_ordered: whether the current stream (or a recorded program), rather than the host, waits for
            collectives.
        can_exchange: whether `all_to_all` and `all_gather` are implemented.
        can_or: whether `all_reduce_or` is implemented.
        has_own_memory: whether `allocate` returns memory in which reductions are faster than in other memory.
        host_of: host of each rank of the group; empty until it has been gathered from the ranks.
        engine_id: random number that is equal on every rank; None until the engine's ranks have agreed on it.
        traffic: the collectives launched and the bytes sent by this rank so far.
        roll_call: names the unresponsive ranks in the error of a failed collective.
    """

    backend = ""
    is_stream_ordered = False
    can_exchange = False
    can_or = False
    has_own_memory = False

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.ranks: tuple[int, ...] = tuple(range(world_size))
        self.host_of: Mapping[int, Hashable] = {}
        self.engine_id: int | None = None
        self.traffic = Traffic()
        self.roll_call = RollCall()
        self._joined: list[Comm] = []

    # ---- collectives of every transport ----

    @abstractmethod
    def all_reduce(self, flat: Tensor) -> Work:
        """Launch a sum over all ranks, in place.

        Args:
            flat: `[numel]`, of the same dtype on every rank. The caller keeps the tensor alive and unchanged
                until it has waited for the work.

        Cost: with W ranks, every rank sends 2 (W - 1) / W times the bytes of `flat`, as in a ring. Over gloo,
        a rank sends at most 5 times the bytes of a small vector: see [Note: small reductions] in
        torch_dist.py.
        """

    @abstractmethod
    def all_reduce_max(self, flat: Tensor) -> Work:
        """Launch a maximum over all ranks, in place; otherwise like `all_reduce`."""

    def all_reduce_or(self, flat: Tensor) -> Work:
        """Launch a bitwise OR of int64 values over all ranks, in place; otherwise like `all_reduce`."""
        raise NotImplementedError(f"{type(self).__name__} has no all_reduce_or: can_or is False")

    @abstractmethod
    def all_gather_object(self, value: object) -> list[Any]:
        """Gather a picklable value from each rank, and return the values in rank order.

        The caller must not change the values. This method waits for all ranks, and is meant for setup and
        errors.
        """

    def max_of(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks; the call waits for all ranks.

        Args:
            values: 64-bit integers; every rank passes the same number of values.
        """
        return [max(each) for each in zip(*self.all_gather_object(values), strict=True)]

    def all_gather_objects(
        self, values: Sequence[object], *numbers: int
    ) -> tuple[list[list[Any]], list[int]]:
        """Return the results of `all_gather_object` for each value, and of `max_of` for the numbers.

        This method waits for the results. The default implementation runs one collective after another.
        """
        gathered = [self.all_gather_object(value) for value in values]
        return gathered, self.max_of(*numbers) if numbers else []

    @abstractmethod
    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with the values of rank 0, and wait for the collectives.

        Args:
            tensors: tensors to overwrite in place. They may have any shape and dtype, but each tensor must
                have the same shape and dtype on every rank.

        Cost: rank 0 sends the bytes of `tensors` (XLA uses an all-reduce in float32 instead). Tensors that
        share a collective are copied.
        """

    # ---- exchanges of parts: for transports with `can_exchange` ----

    def all_to_all(self, received: Tensor, parts: Tensor) -> Work:
        """Launch an exchange in which every rank sends a different part to each rank.

        Args:
            received: output, `[world_size * n]`, with one part from each rank, in rank order.
            parts: input of the same shape and dtype, with one part for each rank, in rank order. The size n
                is equal on every rank.

        Cost: with W ranks, every rank sends (W - 1) / W times the bytes of `parts`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no all_to_all: can_exchange is False")

    def all_gather(self, gathered: Tensor, part: Tensor) -> Work:
        """Launch an all-gather of one part from each rank.

        Args:
            gathered: output, `[world_size * n]`, with one part from each rank, in rank order.
            part: input, `[n]`, of the same dtype; may be this rank's part of `gathered`. The size n is equal
                on every rank.

        Cost: with W ranks, every rank sends (W - 1) times the bytes of `part`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no all_gather: can_exchange is False")

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros of shape `[numel]`, in the memory in which this transport reduces fastest.

        The memory is freed together with the tensor. By default, torch allocates it.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Reserve one block of memory for the next buffers; by default, do nothing.

        Args:
            sizes: sizes of the buffers in bytes, equal on every rank.
        """

    def unsupported_reason(self, dtype: torch.dtype) -> str:
        """Return why this transport cannot reduce a dtype, or an empty string (the default)."""
        del dtype
        return ""

    # ---- related transports ----

    def with_own_group(self) -> Comm:
        """Return a transport over the same ranks, for collectives that never match those of other code.

        Every rank must call this. The result is released together with this transport. The default
        implementation returns this transport.
        """
        return self

    def between_hosts(self) -> Comm | None:
        """Return a transport over the same ranks for tensors in host memory; it uses no device.

        Every rank must call this. The result is released together with this transport. None, the default,
        means that the host waits for collectives anyway, or that there is no backend for host memory.
        """
        return None

    def join(self, other: Comm) -> None:
        """Share the traffic counters, the stall watch and the hosts of `other`.

        Releasing `other` also releases this transport.
        """
        self.traffic, self.host_of = other.traffic, other.host_of
        self.roll_call.watch = other.roll_call.watch
        other._joined.append(self)

    def release(self) -> None:
        """Release the threads that this transport has started and the process groups that it has created."""
        for comm in self._joined:
            comm.release()
        self._joined = []
        if self.roll_call.watch is not None:
            self.roll_call.watch.close()
            self.roll_call.watch = None

    # ---- waiting ----

    def side_stream(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Run the body on a stream where waiting for collectives does not stall the backward.

        Args:
            tensors: tensors of the current stream that the body reads. Their memory is not reused before the
                kernels of the body have run.

        By default the body runs on the current stream.
        """
        del tensors
        return nullcontext()

    def run(
        self, launch: Callable[[bool], dist.Work | None], what: str, group: dist.ProcessGroup | None = None
    ) -> None:
        """Run a collective of `torch.distributed` and wait for it.

        Args:
            launch: function that starts the collective. If called with True, it returns the work, or waits
                for the collective and returns None. If called with False, it waits for the collective.
            what: description of the collective.
            group: process group of the collective; None means the process group of this transport.

        By default this method waits without checking which ranks are missing.
        """
        del what, group
        launch(False)

    def watch_stalls(self, after_s: float) -> None:
        """Warn about collectives that a rank has not joined after `after_s` seconds; fail if a rank has died.

        Every rank of the group must call this, in the order in which engines are created. By default this
        method does nothing.
        """

    def report_position(self, position: Callable[[], str]) -> None:
        """Register a function that describes this rank; the stall watch calls it on another thread."""
        if self.roll_call.watch is not None:
            self.roll_call.watch.position = position


class Unbroken:
    """Context manager that prevents further collectives after an interrupt in its body.

    Collectives are prevented only if the body has launched a collective. Ctrl-C or an out-of-memory error
    occurs on a single rank. The other ranks then wait for the next collective of the body, which this rank
    can no longer determine. Other exceptions occur on all ranks.

    Args:
        comm: transport that the body uses, or a transport joined with it.
    """

    # A class is faster than a generator, which matters because a window enters several of these contexts.
    def __init__(self, comm: Comm) -> None:
        self._comm, self._num_before = comm, comm.traffic.collectives

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_interrupt(error) and self._comm.traffic.collectives != self._num_before:
            self._comm.roll_call.break_off(error)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception is Ctrl-C or out of memory, which can occur anywhere on a single rank."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return error is not None and not isinstance(error, Exception)


@dataclass(frozen=True)
class Levels:
    """The two transports of a rank: one over the ranks of its own host, and one across hosts."""

    inside: Comm  # Transport over the ranks of this rank's host.
    # Transport over the ranks that have the same index on their hosts, or over this rank alone if a smaller
    # host has no rank with this index.
    across: Comm
    num_parts: int  # number of ranks per host that sum a part across hosts: the size of the smallest host

    def part_of(self, numel: int) -> slice:
        """Return the elements of a bucket that this rank sums across hosts."""
        size, index = -(-numel // self.num_parts), self.inside.rank
        if index >= self.num_parts:
            return slice(0, 0)
        return slice(min(index * size, numel), min((index + 1) * size, numel))


class Local(Comm):
    """The transport of a single process, which is the only rank and sends nothing."""

    can_exchange = True

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    def between_hosts(self) -> Local:
        return self

    def all_reduce(self, flat: Tensor) -> Done:
        return Done(flat)

    def all_reduce_max(self, flat: Tensor) -> Done:
        return Done(flat)

    def all_to_all(self, received: Tensor, parts: Tensor) -> Done:
        return Done(received.copy_(parts))

    def all_gather(self, gathered: Tensor, part: Tensor) -> Done:
        return Done(gathered.copy_(part))

    def all_gather_object(self, value: object) -> list[Any]:
        return [value]

    def broadcast_(self, tensors: list[Tensor]) -> None:
        pass


# ---- hosts ----


def spans_hosts(comm: Comm) -> bool:
    """Whether the ranks of a transport are on several hosts; True if their hosts are not known."""
    return not comm.host_of or len({comm.host_of[rank] for rank in comm.ranks}) > 1


def own_host() -> Hashable:
    """Return the identity of this host, which is equal for all processes on the host."""
    return ProcessId.own().space, own_network()


def by_host(hosts: Sequence[Hashable]) -> Hosts:
    """Group ranks by host, given the host of each rank; hosts are in the order of their first ranks."""
    return tuple(
        tuple(rank for rank, host in enumerate(hosts) if host == one) for one in dict.fromkeys(hosts)
    )
