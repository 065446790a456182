"""Which parameters any rank has used in a window.

`.grad` of the others is set to None.

Whether `.grad` is None is known to the host alone, and depends on the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Done, Work
from pyengine.ops.capture import is_capturing
from pyengine.ops.device import HOST, Readback, send

# Flags between hosts are padded to a multiple of this length. Where ranks send windows of different engines,
# which the header reports, they all-reduce flags of different parameters, and gloo ends a process that
# receives more bytes than it expects.
_LENGTH = 4096


class UsedFlags:
    """The used flags of one window, uint8 `[params]` or longer, while `work` max-reduces them over ranks."""

    def __init__(self, mine: Sequence[bool], flags: Tensor, work: Work, *, on_stream: bool) -> None:
        self._mine, self._flags, self._work, self._on_stream = list(mine), flags, work, on_stream

    def drop_unused(self, params: Sequence[Parameter]) -> list[int]:
        """Set `.grad` of unused parameters, in the order of the flags, to None; return their indices.

        In work that is captured as a graph nothing is read: no rank has used what this one has not.

        Cost: a rank that has not used a parameter waits for the flags of all ranks. Where devices exchange
        the flags it waits for all work queued on its device. Other ranks do not wait.
        """
        asked = [i for i, used in enumerate(self._mine) if not used and params[i].grad is not None]
        if asked or self._on_stream:  # waiting for a stream costs the host nothing
            self._work.wait()
        if is_capturing():
            for index in asked:
                params[index].grad = None
            return asked
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
        if self.on_hosts and is_capturing():  # hosts exchange them in every run; see `Reducer.run_again`
            none = torch.empty(0, dtype=torch.uint8, device=HOST)
            return UsedFlags(used, none, Done(none), on_stream=False)
        flags = send(used, torch.uint8, self._device)
        if self.on_hosts:
            flags = torch.nn.functional.pad(flags, (0, -len(used) % _LENGTH))
        work = self._comm.all_reduce_max(flags)
        return UsedFlags(used, flags, work, on_stream=self._comm.is_stream_ordered)
