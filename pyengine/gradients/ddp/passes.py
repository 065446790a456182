"""What is done to one of DDP's buckets on its way to the wire and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pyengine.gradients.ddp.bucket_norms import OneBucket

# What to multiply in, 0-dim, given a 0-dim one of the type in which the bucket is multiplied; None for
# nothing.
Scale = Callable[[Tensor], Tensor | None]


def _leave(flat: Tensor, scale: Tensor) -> bool:
    del flat, scale
    return False


@dataclass(frozen=True)
class Passes:
    """The passes over a bucket.

    Attributes:
        before, after: what to multiply in on the way to the wire and from it.
        fill: writes the bucket into a flat buffer, `[numel]` in the wire's type, times a float32 0-dim scale;
            False leaves that to the hook.
        norms: read what lands, in the pass that writes it back; None for nobody.
    """

    before: Scale
    after: Scale
    fill: Callable[[Tensor, Tensor], bool] = _leave
    norms: OneBucket | None = None
