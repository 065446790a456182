"""Which parameters any rank has used in a window.

`.grad` of the others is set to None.

Whether `.grad` is None is known to the host alone, and depends on the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work
from pyengine.ops.device import HOST, Readback, send

# Flags between hosts are padded to a multiple of this length. Where ranks send windows of different engines,
# which the header reports, they all-reduce flags of different parameters, and gloo ends a process that
# receives more bytes than it expects.
_LENGTH = 4096


class UsedFlags:
    """The used flags of one window, uint8 `[params]` or longer, while `work` max-reduces them over ranks."""

    def __init__(self, mine: Sequence[bool], flags: Tensor, work: Work, *, on_hosts: bool) -> None:
        self._mine, self._flags, self._work, self._on_hosts = list(mine), flags, work, on_hosts

    def drop_unused(self, params: Sequence[Parameter]) -> list[int]:
        """Set `.grad` of unused parameters, in the order of the flags, to None; return their indices.

        Cost: a rank that has not used a parameter waits for the flags of all ranks. Where devices exchange
        the flags it waits for all work queued on its device. Other ranks do not wait where hosts exchange the
        flags.
        """
        asked = [i for i, used in enumerate(self._mine) if not used and params[i].grad is not None]
        if asked or not self._on_hosts:
            self._work.wait()
        if not asked:
            return []
        used = Readback(self._flags).get()
        dropped = [index for index in asked if not used[index]]
        for index in dropped:
            params[index].grad = None
        return dropped


class UsedAnywhere:
    """All-reduces used flags between hosts where possible, else between devices.

    All ranks that sum these parameters' gradients make this object.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        hosts = comm.between_hosts()
        self.on_hosts = hosts is not None
        self._comm = comm if hosts is None else hosts
        self._device = device if hosts is None else HOST

    def all_reduce(self, used: Sequence[bool]) -> UsedFlags:
        """Launch the all-reduce of a window's flags, on every rank at the same point of the window.

        Cost: an all-reduce of a byte a parameter, between hosts of 4 KiB or a multiple; no rank waits.
        """
        rest = -len(used) % _LENGTH if self.on_hosts else 0
        flags = send([*used, *[False] * rest], torch.uint8, self._device)
        return UsedFlags(used, flags, self._comm.all_reduce_max(flags), on_hosts=self.on_hosts)
