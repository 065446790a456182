"""Flags of the parameters that any rank has used in a window.

If no rank has used a parameter, its `.grad` is set to None.

Whether a parameter is unused depends on the flags of all ranks, which the host has to read.
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

# Flags that hosts exchange are padded to a multiple of this length. Without padding, ranks in windows of
# different engines (an error that the header reports) would all-reduce different numbers of flags, and gloo
# aborts a process that receives more bytes than it expects.
_LENGTH = 4096
_BITS = 64


class UsedFlags:
    """The flags of used parameters in one window, while `work` reduces them over ranks.

    `flags` is uint8 `[params]`, or int64 with 64 flags per element and trailing zeros. With `on_stream`, a
    stream, not the host, waits for `work`.
    """

    def __init__(self, mine: Sequence[bool], flags: Tensor, work: Work, *, on_stream: bool) -> None:
        self._mine, self._flags, self._work, self._on_stream = list(mine), flags, work, on_stream

    def drop_unused(self, params: Sequence[Parameter], *, waits: bool = False) -> list[int]:
        """Set `.grad` of unused parameters to None, and return their indices.

        `params` has the order of the flags.

        With `waits`, a rank that has left the window always waits for its collective, because ranks that are
        still in the window do not send their flags.

        While a graph is captured, the flags are not read, and a parameter that this rank has not used counts
        as unused on all ranks.

        Cost: a rank that has not used a parameter waits for the flags of all ranks. If devices exchange the
        flags, this rank waits for all work queued on its device. Other ranks do not wait.
        """
        dropped = [i for i, used in enumerate(self._mine) if not used and params[i].grad is not None]
        if dropped or waits or self._on_stream:  # waiting on a stream does not block the host
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
    """All-reduces the flags of used parameters, between hosts if possible and otherwise between devices.

    All ranks that sum the parameters' gradients must create this object.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        hosts = comm.between_hosts()
        self.on_hosts = hosts is not None
        self._comm = comm if hosts is None else hosts
        self._device = device if hosts is None else HOST

    def all_reduce(self, used: Sequence[bool], *, are_all: bool = False) -> UsedFlags:
        """Launch the all-reduce of a window's flags; every rank calls this at the same point.

        With `are_all` no collective is launched, because all ranks know that every rank has used all of its
        parameters.

        Cost: between hosts, an all-reduce of one bit per parameter through gloo, padded to a multiple of 512
        bytes. Otherwise an all-reduce of one byte per parameter. No rank waits.
        """
        # In a captured window, hosts exchange the flags in every replay; see `BucketReducer.run_again`.
        if are_all or (self.on_hosts and is_capturing()):
            none = torch.empty(0, dtype=torch.uint8, device=HOST)
            used = [True] * len(used) if are_all else used
            return UsedFlags(used, none, Done(none), on_stream=False)
        comm = self._comm
        if comm.can_or:
            # The flags are sent as bits, because small messages are faster; see [Note: small reductions] in
            # comm/torch_dist.py.
            flags = _as_bits(used, len(used) + (-len(used) % _LENGTH if self.on_hosts else 0))
            work = comm.all_reduce_or(flags)
        else:
            flags = send(used, torch.uint8, self._device)
            work = comm.all_reduce_max(flags)
        return UsedFlags(used, flags, work, on_stream=comm.is_stream_ordered)


def _as_bits(used: Sequence[bool], length: int) -> Tensor:
    """Return the flags, padded with zeros to `length`, as int64 on the host.

    Flag i is bit i % 64 of element i // 64.
    """
    bits = int("0" + "".join(map("01".__getitem__, reversed(used))), 2)
    num_words = -(-length // _BITS)
    words = struct.unpack(f"<{num_words}q", bits.to_bytes(num_words * _BITS // 8, "little"))
    return torch.tensor(words, dtype=torch.int64, device=HOST)
