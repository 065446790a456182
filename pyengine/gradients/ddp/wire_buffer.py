"""What is kept of one of DDP's buckets from one reduction to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.comm.base import Comm, flat_zeros
from pyengine.ops.plan import BucketPlan
from pyengine.wire import Wire


class WireBuffer:
    """Memory of the wire's type for a bucket, and the pass into it.

    Args:
        flat: the bucket's buffer, `[numel]`; not kept.
        wire: how it travels.
        params: the bucket's.

    Attributes:
        wire: as given.
        params: their ids.
        plan: the buffer, as one slot.
        one: float32, 0-dim, 1.
    """

    def __init__(self, flat: Tensor, wire: Wire, params: Sequence[Tensor]) -> None:
        self.numel, self.wire = flat.numel(), wire
        self.params = {id(param) for param in params}
        self.plan = BucketPlan([0], [self.numel])
        self.one = torch.ones((), dtype=torch.float32, device=flat.device)
        self._flat: Tensor | None = None

    def flat(self, comm: Comm) -> Tensor:
        """Return memory of the wire's type, `[numel]`, this object's; of the transport that asks first."""
        if self._flat is None:
            self._flat = flat_zeros(comm, self.numel, dtype=self.wire.dtype, device=self.one.device)
        return self._flat
