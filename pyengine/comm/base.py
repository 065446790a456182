"""What a transport is: the few collectives that the engine and its wires may call."""

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

# Ranks by host. A "host" is any island of a fast network.
Hosts = tuple[tuple[int, ...], ...]


@dataclass
class Traffic:
    """Counters of one transport: collectives launched, and the bytes that this rank sends for them."""

    collectives: int = 0
    # By the formula of a ring, in which each rank also forwards a broadcast; of small reductions over gloo
    # what is sent.
    bytes_sent: int = 0

    def count(self, num_bytes: int) -> None:
        self.collectives += 1
        self.bytes_sent += num_bytes


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that one rank of W sends in a ring all-reduce: 2 (W - 1) / W times `num_bytes`."""
    return 2 * (world_size - 1) * num_bytes // world_size


def by_dtype(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors by dtype, in their order: one collective or pass needs a single dtype."""
    found: dict[torch.dtype, list[T]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return [*found.values()]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the result is there; on an accelerator, let the current stream wait for it."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the collective. Default: there is none."""
        raise RuntimeError(f"a {type(self).__name__} has no future: wait for it")

    def is_completed(self) -> bool:
        """Whether waiting would not block. Default: it never does."""
        return True


class Done(Work):
    """A collective that was complete when it was launched; its future holds `result`."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._result])
        return future


class Comm(ABC):
    """Base class of transports: collectives among the ranks of a group. `comm_for` makes the right one.

    A transport implements `all_reduce`, `all_reduce_max`, `all_gather_object` and `broadcast_`. All other
    methods and attributes have defaults, for a transport that has nothing to add.

    Args:
        rank: this rank in the group.
        world_size: number of ranks in the group.

    Attributes:
        rank, world_size: as given.
        ranks: all ranks of the group, as the default group numbers them.
        backend: name of the backend, "nccl" for example; empty if there is none.
        is_stream_ordered: whether the current stream (or a recorded program) waits for collectives, not the
            host.
        can_exchange: whether `all_to_all` and `all_gather` are there.
        can_or: whether `all_reduce_or` is there.
        has_own_memory: whether `allocate` returns memory in which reductions are faster than elsewhere.
        host_of: host of each rank of the group; empty until the engine's ranks have gathered it.
        engine_id: random, the same on every rank; None until the engine's ranks have agreed on it.
        traffic: what this rank has sent so far.
        roll_call: adds to the error of a failed collective which ranks do not answer.
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

    # ---- collectives that every transport has ----

    @abstractmethod
    def all_reduce(self, flat: Tensor) -> Work:
        """Launch a sum over all ranks, in place.

        Args:
            flat: `[numel]`, of the same dtype on every rank. The caller keeps it alive and unchanged until
                the work has been waited for.

        Cost: 2 (W - 1) / W times its bytes sent by every rank of W, as in a ring. Over gloo at most 5 times
        the bytes of a small vector: see [Note: small reductions] in torch_dist.py.
        """

    @abstractmethod
    def all_reduce_max(self, flat: Tensor) -> Work:
        """Launch a maximum over all ranks, in place; otherwise as `all_reduce`."""

    def all_reduce_or(self, flat: Tensor) -> Work:
        """Launch a bitwise or of int64 over all ranks, in place; otherwise as `all_reduce`."""
        raise NotImplementedError(f"{type(self).__name__} has no all_reduce_or: can_or is False")

    @abstractmethod
    def all_gather_object(self, value: object) -> list[Any]:
        """Return the values of all ranks, by rank; read only. It waits and pickles: for set-up and errors."""

    def max_of(self, *values: int) -> list[int]:
        """Return the largest of each value on any rank. It waits.

        Args:
            values: whole numbers of 64 bits, as many on every rank.
        """
        return [max(each) for each in zip(*self.all_gather_object(values), strict=True)]

    def all_gather_objects(
        self, values: Sequence[object], *numbers: int
    ) -> tuple[list[list[Any]], list[int]]:
        """Return each value as `all_gather_object` does, and each number as `max_of` does. It waits.

        Default: one after the other.
        """
        gathered = [self.all_gather_object(value) for value in values]
        return gathered, self.max_of(*numbers) if numbers else []

    @abstractmethod
    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's, and wait.

        Args:
            tensors: of any shapes and dtypes, the same on every rank; the caller's memory.

        Cost: their bytes sent by rank 0 (on XLA an all-reduce of them as float32). Tensors that share a
        collective are copied for it.
        """

    # ---- exchanges of parts: `can_exchange` ----

    def all_to_all(self, received: Tensor, parts: Tensor) -> Work:
        """Launch an exchange in which every rank sends a different part to each rank.

        Args:
            received: `[world_size * n]`, written: the r-th part comes from rank r.
            parts: of the same shape and dtype, read: the r-th part goes to rank r. n is the same on every
                rank.

        Cost: (W - 1) / W times its bytes sent by every rank of W.
        """
        raise NotImplementedError(f"{type(self).__name__} has no all_to_all: can_exchange is False")

    def all_gather(self, gathered: Tensor, part: Tensor) -> Work:
        """Launch an all-gather of one part of each rank.

        Args:
            gathered: `[world_size * n]`, written: the r-th part comes from rank r.
            part: `[n]`, of the same dtype, read; may be this rank's part of `gathered`. n is the same on
                every rank.

        Cost: (W - 1) times its bytes sent by every rank of W.
        """
        raise NotImplementedError(f"{type(self).__name__} has no all_gather: can_exchange is False")

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros, `[numel]`, in the memory that this transport reduces fastest.

        The memory lives as long as the tensor. Default: torch's own memory.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Reserve one piece of memory for the next buffers, of `sizes` bytes; same sizes on every rank.

        Default: nothing is reserved.
        """

    def unsupported_reason(self, dtype: torch.dtype) -> str:
        """Return why this transport cannot reduce a dtype; empty if it can. Default: all are supported."""
        del dtype
        return ""

    # ---- transports beside this one ----

    def with_own_group(self) -> Comm:
        """Return a transport over the same ranks whose collectives cannot be paired with other code's.

        Every rank calls this. The result is released together with this transport. Default: this transport.
        """
        return self

    def between_hosts(self) -> Comm | None:
        """Return a transport over the same ranks for tensors in host memory, which needs no device.

        Every rank calls this. The result is released together with this transport. Default: None. The host
        then waits for collectives anyway, or the hosts have no backend.
        """
        return None

    def join(self, other: Comm) -> None:
        """Share the traffic counters and the stall watch of `other`; be released together with it."""
        self.traffic, self.host_of = other.traffic, other.host_of
        self.roll_call.watch = other.roll_call.watch
        other._joined.append(self)

    def release(self) -> None:
        """End everything that this transport runs beside the caller, and the process groups it has made."""
        for comm in self._joined:
            comm.release()
        self._joined = []
        if self.roll_call.watch is not None:
            self.roll_call.watch.close()
            self.roll_call.watch = None

    # ---- waiting ----

    def side_stream(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Run the body where waiting for collectives does not stall the running backward.

        Args:
            tensors: of the current stream, read by the body. Their memory is not reused before the body's
                kernels have run.

        Default: right here, for a transport that needs no other stream.
        """
        del tensors
        return nullcontext()

    def run(
        self, launch: Callable[[bool], dist.Work | None], what: str, group: dist.ProcessGroup | None = None
    ) -> None:
        """Run a collective of torch's own and wait for it.

        Args:
            launch: starts it. Given True it returns the work, or waits and returns None; given False it
                waits.
            what: description of the collective.
            group: process group of the collective, if not that of this transport.

        Default: wait, without looking for ranks that do not come.
        """
        del what, group
        launch(False)

    def watch_stalls(self, after_s: float) -> None:
        """Report collectives that ranks have not come to after `after_s` seconds; fail where one has died.

        Every rank of the group calls this, in the order in which it makes engines. Default: no watch.
        """

    def report_position(self, position: Callable[[], str]) -> None:
        """Let the stall watch describe where this rank is by `position`, which another thread calls."""
        if self.roll_call.watch is not None:
            self.roll_call.watch.position = position


class Unbroken:
    """A context that starts no further collective once an interrupt has left its body behind a launch.

    Ctrl-C or no memory comes on one rank alone. The other ranks then wait for the collective that the body
    was about to launch, which this rank no longer knows. Other exceptions are those that all ranks raise.

    Args:
        comm: transport of the body, or one that has joined it.
    """

    # A class, not a generator: there are several a window.
    def __init__(self, comm: Comm) -> None:
        self._comm, self._num_before = comm, comm.traffic.collectives

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_interrupt(error) and self._comm.traffic.collectives != self._num_before:
            self._comm.roll_call.break_off(error)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception may come anywhere, on one rank alone: Ctrl-C, or no memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return error is not None and not isinstance(error, Exception)


@dataclass(frozen=True)
class Levels:
    """Transports of a rank in two levels."""

    inside: Comm  # over the ranks of its host
    # Over the ranks with the same index on every host; over this rank alone where a smaller host has none.
    across: Comm
    num_parts: int  # ranks of the smallest host, each of which sums a part across hosts

    def part_of(self, numel: int) -> slice:
        """Return the elements of a bucket that this rank sums across hosts."""
        size, index = -(-numel // self.num_parts), self.inside.rank
        if index >= self.num_parts:
            return slice(0, 0)
        return slice(min(index * size, numel), min((index + 1) * size, numel))


class Local(Comm):
    """The transport of a single process: one rank, and nothing moves."""

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
    """Whether the ranks of a transport are on several hosts; True where that is not known."""
    return not comm.host_of or len({comm.host_of[rank] for rank in comm.ranks}) > 1


def own_host() -> Hashable:
    """Return an identity of this host, the same for all of its processes."""
    return ProcessId.own().space, own_network()


def by_host(hosts: Sequence[Hashable]) -> Hosts:
    """Return the indices of ranks by host, in the order of their first ranks; `hosts` is by rank."""
    return tuple(
        tuple(rank for rank, host in enumerate(hosts) if host == one) for one in dict.fromkeys(hosts)
    )
