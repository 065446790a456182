"""What a wire loses is kept, and goes with the next window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.wire.base import Wire
from pyengine.wire.bucket_wire import BucketWire, without_memory
from pyengine.wire.exchange import Encoding, HasEncoding, Parts
from pyengine.wire.memory import BucketMemory


@dataclass(frozen=True)
class ErrorFeedback:
    """Keep what another wire's rounding loses, and add it to what is sent in the next window.

    Every rank keeps one residual, float32, an element: what its values lost, and in its own part of a bucket
    what the sum lost as well (sums of sharded gradients are not rounded). So the sum over windows of all that
    has arrived differs from the sum of the true gradients by no more than the residuals that are left, which
    is what one window loses: the mean over n windows is n times nearer (Seide et al. 2014, Karimireddy et al.
    2019; of both roundings Tang et al. 2019).

    1/count comes in before the residual is added, which is therefore in units of the mean gradient: windows
    may have any counts. A window that is not used, for inf or nan say, takes the residuals with it: they
    start from zero again.

    Args:
        wire: `Int8(...)`, `FP8(...)`, `BF16(sum="fp32")` or `FP16(sum="fp32")`.

    Raises:
        TypeError, ValueError: it is another one.

    Cost: 4 bytes an element kept, and as many read and written in the encoding pass. Under FSDP2 an element
    of the unsharded gradients, on every rank, whatever the world size; and 4 bytes read and written there
    for 1/count.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    folds_count: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True

    wire: Wire

    def __post_init__(self) -> None:
        if isinstance(self.wire, type) or not isinstance(self.wire, HasEncoding):
            raise TypeError(
                f"wire={self.wire!r}: need a wire that is rounded where its rank can see it: Int8(), FP8(), "
                "BF16(sum='fp32') or FP16(sum='fp32')"
            )
        if self.wire.encoding is None:
            raise ValueError(
                f"wire={self.wire!r}: its sum is rounded at every rank that it passes, where nobody sees the "
                f"error; use {type(self.wire).__name__}(sum='fp32')"
            )

    @property
    def _encoding(self) -> Encoding:
        assert isinstance(self.wire, HasEncoding) and self.wire.encoding is not None  # or it was refused
        return self.wire.encoding

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire of one bucket, whose residuals lie in `memory`."""
        return BucketWire(self, memory, self._encoding, keeps_residual=True)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        raise without_memory(self)

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Sum sharded gradients; in `for_bucket`'s wire, which keeps what every part's values lose."""
        raise without_memory(self)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return what one rank sends: as the other wire, for whole blocks."""
        return Parts(self._encoding.codec, numel, world_size).bytes_sent
