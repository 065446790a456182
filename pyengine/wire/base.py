"""The two seams that a bucket's sum goes through: what a wire is, and the little it may ask of a transport."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the result is in place (on an accelerator: until its stream may use it)."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the collective."""

    def is_completed(self) -> bool:
        """Whether waiting would not block."""


class Comm(Protocol):
    """Moves bytes between the ranks of a group; see `pyengine.comm`."""

    @property
    def world_size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def is_stream_ordered(self) -> bool: ...

    def launch(self) -> None:
        """Let the device begin with what it was given, where it waits for that."""

    def all_reduce(self, flat: Tensor) -> Work:
        """Start summing `flat` over all ranks, in place."""

    def all_reduce_max(self, flat: Tensor) -> Work:
        """Start taking the maximum of `flat` over all ranks, in place."""


class Wire(Protocol):
    """Owns how one flat bucket is summed over ranks.

    Attributes:
        dtype: element type on the network; the engine hands over a flat buffer of this type.
        folds_count: whether 1/count is multiplied in before the values become this type (narrow types: it keeps sums
            in range and costs no pass). Otherwise the engine applies it after the sum.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def folds_count(self) -> bool: ...

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        """Start summing `flat` `[numel]`, in place; every rank ends with the same bits."""

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the bytes that one rank sends for a bucket of `numel` elements."""
