"""What a wire is: how a bucket is sent and summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.ops.codec import Codec
from pyengine.wire.memory import BucketMemory


@dataclass(frozen=True)
class Encoding:
    """How values are encoded."""

    codec: Codec
    seed: int | None = None  # of stochastic rounding; None rounds to nearest


class Spelled:
    """A frozen dataclass whose repr has no default arguments. Ranks compare this repr."""

    def __repr__(self) -> str:
        mine: Any = self
        given = [(f.name, getattr(self, f.name)) for f in fields(mine) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


class Wire(ABC):
    """Base class of wires: how one flat bucket is summed over ranks.

    A wire implements `dtype`, `all_reduce_` and `bytes_on_wire`. All other methods and attributes have
    defaults, for a wire that sends every element as it is and keeps nothing between windows. Make a subclass
    a frozen dataclass in a module: ranks send each other their wires, and compare how they print.
    """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the flat buffers that the engine passes."""

    @property
    def folds_count(self) -> bool:
        """Whether values are multiplied by 1/count before the cast to `dtype`.

        This keeps sums in the range of float16, and residuals in units of means. Otherwise the engine
        multiplies after the sum.
        """
        return False

    @property
    def is_encoded(self) -> bool:
        """Whether the result is only close to the sum, so that a sum of zeros need not be 0.

        Buckets of such a wire contain gradients only. Gradients that have its `dtype` already are encoded,
        too. A wire around another wire answers for both.
        """
        return False

    @property
    def encoding(self) -> Encoding | None:
        """How values are encoded, if their rounding error is known on each rank; see `ErrorFeedback`."""
        return None

    @property
    def keeps_residual(self) -> bool:
        """Whether `for_bucket` keeps the rounding error of a window and adds it to the next one."""
        return False

    @property
    def needs_exchange(self) -> bool:
        """Whether it sends by `Comm.all_to_all` and `Comm.all_gather`, which XLA devices do not have."""
        return self.is_encoded or self.encoding is not None

    @property
    def can_reduce_scatter(self) -> bool:
        """Whether it implements `reduce_scatter`."""
        return type(self).reduce_scatter is not Wire.reduce_scatter

    @property
    def needs_prepare(self) -> bool:
        """Whether it implements `prepare`."""
        return type(self).prepare is not Wire.prepare

    def prepare(self, comm: Comm) -> list[str]:
        """Set up the transport before the first bucket is sent; return problems, empty if there are none.

        Every rank of the transport calls this.
        """
        del comm
        return []

    @property
    def keeps_memory(self) -> bool:
        """Whether it implements `for_bucket`."""
        return type(self).for_bucket is not Wire.for_bucket

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire that sends one bucket in all windows; this one, if it keeps nothing for a bucket.

        Args:
            memory: what it may keep from one window to the next; belongs to the bucket's owner.
        """
        del memory
        return self

    @abstractmethod
    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        """Launch the sum of a bucket over all ranks, in place; every rank gets the same bits.

        Args:
            flat: of `dtype`, `[numel]`; the engine keeps it alive until the work has been waited for.
            comm: transport.

        Returns:
            A work that is done when `flat` holds the sum.

        Cost: `bytes_on_wire` sent by every rank.
        """

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Sum sharded gradients over all ranks, and keep the part of this rank.

        The host waits; on an accelerator the stream.

        Args:
            out: `[n]`, of `dtype` or a wider dtype, written: the part of the sum for this rank.
            parts: of `dtype`, `[world_size * n]`, read: the r-th part is for rank r.
            comm: transport over the ranks that keep parts; its `can_exchange` is true.

        Cost: (W - 1) / W times the bytes of `parts` sent by every rank of W.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reduce_scatter")

    @abstractmethod
    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the number of bytes that one rank sends for a bucket of `numel` elements."""
