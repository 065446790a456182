"""What a transport is: the few collectives that the engine and its wires may call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


@dataclass
class Traffic:
    """Counters of one transport.

    Attributes:
        collectives: how many were launched.
        bytes_sent: bytes that this rank sends for them, by the ring's formula.
    """

    collectives: int = 0
    bytes_sent: int = 0

    def count(self, num_bytes: int) -> None:
        """Count a collective for which this rank sends `num_bytes`."""
        self.collectives += 1
        self.bytes_sent += num_bytes


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Return what one rank sends in a ring all-reduce of `num_bytes`: 2 (W - 1) / W times as many."""
    return 2 * (world_size - 1) * num_bytes // world_size


def by_dtype(tensors: Iterable[T]) -> list[list[T]]:
    """Return the tensors in lists of one dtype each, in their order: what one collective or pass may take."""
    found: dict[torch.dtype, list[T]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return [*found.values()]


def flat_zeros(comm: Comm, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, `[numel]`, where a transport reduces them best; the memory lives as long as they do."""
    if isinstance(comm, Allocates):
        return comm.allocate(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the result is in place (on an accelerator: until its stream may use it)."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the collective."""

    def is_completed(self) -> bool:
        """Whether waiting would not block."""


class Comm(Protocol):
    """Moves bytes between the ranks of a group; made by `comm_for`.

    Attributes:
        is_stream_ordered: whether waiting for a collective costs the host nothing: the current stream waits,
            or a recorded program.
        traffic: what this rank has sent so far.
    """

    traffic: Traffic

    @property
    def world_size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def is_stream_ordered(self) -> bool: ...

    def all_reduce(self, flat: Tensor) -> Work:
        """Start summing over all ranks, in place.

        Args:
            flat: `[numel]`, of the same dtype on every rank; the caller's memory, which has to stay alive and
                untouched until the work has been waited for.

        Cost: 2 (W - 1) / W times its bytes sent by every rank of W, as a ring does it.
        """

    def all_reduce_max(self, flat: Tensor) -> Work:
        """Start taking the maximum over all ranks, in place; otherwise as `all_reduce`."""

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's value, by rank. For set-up and error reports only: it waits and pickles."""

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's; it waits.

        Args:
            tensors: of any shapes and dtypes, the same on every rank; the caller's memory.

        Cost: their bytes sent by rank 0 (on XLA an all-reduce of them as float32); tensors that are not alone
        in a collective are copied for it.
        """

    def release(self) -> None:
        """End what watches over it beside the caller; it may be used further."""

    def side_stream(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Let the body wait for collectives without stalling the running backward, where that takes another
        stream.

        Args:
            tensors: of the current stream, which the body uses and others may free before it has run: their
                memory is not reused until then.
        """


@runtime_checkable
class Exchanges(Protocol):
    """A transport in which every rank can send something else to each other one."""

    @property
    def world_size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_to_all(self, received: Tensor, parts: Tensor) -> Work:
        """Start sending every rank a part of its own.

        Args:
            received: `[world_size * n]`, written: the r-th part comes from rank r.
            parts: of the same shape and dtype, read: the r-th part goes to rank r. n is the same on every
                rank.

        Cost: (W - 1) / W times its bytes sent by every rank of W.
        """

    def all_gather(self, gathered: Tensor, part: Tensor) -> Work:
        """Start sending a part of this rank's to every other one.

        Args:
            gathered: `[world_size * n]`, written: the r-th part comes from rank r.
            part: `[n]`, of the same dtype, read; may be its own place in `gathered`. n is the same on every
                rank.

        Cost: (W - 1) times its bytes sent by every rank of W.
        """


@runtime_checkable
class HasHosts(Protocol):
    """A transport whose ranks' hosts may talk beside their devices."""

    def between_hosts(self) -> Comm | None:
        """Return a transport over the same ranks for tensors in the hosts' memory, by which nobody waits for
        a device; one rank's at once. None where several have none, or where the host waits for collectives in
        any case. Every rank calls this, and its end is the end of what is returned.
        """


@runtime_checkable
class Allocates(Protocol):
    """A transport that reduces faster what lies in memory of its own."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros, `[numel]`, on the transport's device; theirs is the memory as long as they live."""


@runtime_checkable
class Reserves(Allocates, Protocol):
    """One whose memory is best taken in one piece."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Let the next buffers, of so many bytes each, lie in one piece; every rank calls it with the same
        sizes.
        """


@runtime_checkable
class RefusesTypes(Protocol):
    """A transport that cannot reduce every type."""

    def refuses(self, dtype: torch.dtype) -> str:
        """Say why tensors of a type cannot be reduced here; empty if they can."""
