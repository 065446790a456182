"""Which parameters of a bucket were used, and whether a rank gave the window up: told to all ranks with the
bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.ops.device import send

_USED, _GAVE_UP = 1, 2


class UsedFlags(Protocol):
    """A flag a slot, in memory that the bucket owns.

    Attributes:
        inside: their place in the wire buffer, `[slots]`, where they are summed with the bucket, so that nan
            there voids the window; else None.
    """

    inside: Tensor | None

    def write(self, used: Sequence[bool], *, poison: bool) -> None:
        """Write this rank's.

        Args:
            used: by slot.
            poison: void the window, which this rank had to give up.
        """

    def landed(self) -> Tensor:
        """Return them as all ranks have them, `[slots]`, not 0 where a rank used the slot; the bucket's
        memory.
        """


class FlagsInside:
    """Flags behind the slots of the bucket, which are summed with it: 0 or 1, or nan from who gave up.

    Args:
        flags: `[slots]`, of the wire buffer.
    """

    def __init__(self, flags: Tensor) -> None:
        self._flags = flags
        self.inside: Tensor | None = flags

    def write(self, used: Sequence[bool], *, poison: bool) -> None:
        if poison:
            self._flags.fill_(float("nan"))
        elif all(used):
            self._flags.fill_(1)
        else:
            self._flags.copy_(send(used, self._flags.dtype, self._flags.device))

    def landed(self) -> Tensor:
        return self._flags


class FlagsBeside:
    """Flags in bytes, of which ranks take the largest: where what is summed with a bucket would not arrive as
    it is.

    Args:
        flags: uint8 `[slots]`.
    """

    inside: Tensor | None = None

    def __init__(self, flags: Tensor) -> None:
        self._flags = flags
        self._work: Work | None = None

    def write(self, used: Sequence[bool], *, poison: bool) -> None:
        flags = [_GAVE_UP if poison else _USED * is_used for is_used in used]
        self._flags.copy_(send(flags, torch.uint8, self._flags.device))

    def start(self, comm: Comm) -> None:
        """Start to tell all ranks; they may travel with something else, too."""
        self._work = comm.all_reduce_max(self._flags)

    def landed(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._flags


def void_beside(flags: Sequence[UsedFlags], before: Tensor) -> Tensor:
    """Return `before`, or nan if some rank gave the window up in flags that travel beside their bucket.

    Args:
        flags: of all buckets.
        before: float32, 0-dim.
    """
    beside = [each.landed() for each in flags if each.inside is None]
    return torch.where((torch.cat(beside) == _GAVE_UP).any(), torch.nan, before) if beside else before
