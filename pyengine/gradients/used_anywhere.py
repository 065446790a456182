"""Which parameters any rank has used in a window.

`.grad` of the others is set to None.

Whether `.grad` is None is known to the host alone, and depends on the other ranks.
"""

from __future__ import annotations

import struct
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
_BITS = 64


class UsedFlags:
    """The used flags of one window while `work` reduces them over ranks.

    `flags` are uint8 `[params]`; or int64 with 64 flags an element, and zeros behind them.
    `on_stream`: a stream waits for `work`, not the host.
    """

    def __init__(self, mine: Sequence[bool], flags: Tensor, work: Work, *, on_stream: bool) -> None:
        self._mine, self._flags, self._work, self._on_stream = list(mine), flags, work, on_stream

    def drop_unused(self, params: Sequence[Parameter], *, waits: bool = False) -> list[int]:
        """Set `.grad` of unused parameters, in the order of the flags, to None; return their indices.

        `waits` is for a rank that has left the window: the flags of ranks that are still in it do not come.

        In work that is captured as a graph nothing is read: no rank has used what this one has not.

        Cost: a rank that has not used a parameter waits for the flags of all ranks. Where devices exchange
        the flags it waits for all work queued on its device. Other ranks do not wait.
        """
        dropped = [i for i, used in enumerate(self._mine) if not used and params[i].grad is not None]
        if dropped or waits or self._on_stream:  # waiting for a stream costs the host nothing
            self._work.wait()
        if dropped and not is_capturing():
            used = [*map(int, Readback(self._flags).get())]
            if self._flags.dtype == torch.int64:
                used = [used[index // _BITS] >> index % _BITS & 1 for index in range(len(self._mine))]
            dropped = [index for index in dropped if not used[index]]
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

    def all_reduce(self, used: Sequence[bool], *, are_all: bool = False) -> UsedFlags:
        """Launch the all-reduce of a window's flags, on every rank at the same point of the window.

        Nothing is launched with `are_all`: all ranks know that every rank has used all of its parameters.

        Cost: an all-reduce of a bit a parameter through gloo, between hosts of 512 bytes or a multiple, and
        else of a byte a parameter; no rank waits.
        """
        # Of a captured window hosts exchange them in every run; see `BucketReducer.run_again`.
        if are_all or (self.on_hosts and is_capturing()):
            none = torch.empty(0, dtype=torch.uint8, device=HOST)
            used = [True] * len(used) if are_all else used
            return UsedFlags(used, none, Done(none), on_stream=False)
        comm = self._comm
        if comm.can_or:
            # Bits, so that flags are small: see [Note: small reductions] in comm/torch_dist.py.
            flags = _as_bits(used, len(used) + (-len(used) % _LENGTH if self.on_hosts else 0))
            work = comm.all_reduce_or(flags)
        else:
            flags = send(used, torch.uint8, self._device)
            work = comm.all_reduce_max(flags)
        return UsedFlags(used, flags, work, on_stream=comm.is_stream_ordered)


def _as_bits(used: Sequence[bool], length: int) -> Tensor:
    """Return flags, and zeros up to `length`, as int64 on the host.

    Flag i is bit i % 64 of element i // 64.
    """
    bits = int("0" + "".join(map("01".__getitem__, reversed(used))), 2)
    num_words = -(-length // _BITS)
    words = struct.unpack(f"<{num_words}q", bits.to_bytes(num_words * _BITS // 8, "little"))
    return torch.tensor(words, dtype=torch.int64, device=HOST)
