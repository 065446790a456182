"""Which parameters some rank has used in a window: whether `.grad` is None there. That is a fact of the host,
and only the other ranks decide it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, HasHosts, Work
from pyengine.ops.device import HOST, Readback, send

# What hosts tell has a multiple of this length: where ranks send windows of different engines, which the
# header shows, they tell of different parameters, and gloo ends a process that gets more than it waits for.
_LENGTH = 4096


class Told:
    """What the ranks say of one window, under way.

    Args:
        mine: what this rank has said.
        flags: uint8 `[params]` or longer, which `work` makes the maximum over ranks.
        by_hosts: whether the flags lie in the hosts' memory, and no device has to be waited for.
    """

    def __init__(self, mine: Sequence[bool], flags: Tensor, work: Work, *, by_hosts: bool) -> None:
        self._mine, self._flags, self._work, self._by_hosts = list(mine), flags, work, by_hosts

    def drop_unused(self, params: Sequence[Parameter]) -> list[int]:
        """Set `.grad` to None where no rank has used a parameter; return the places of these.

        Args:
            params: as told, with the gradients that have landed.

        Cost: where hosts talk, this one waits for the others to have come as far, if some gradient has landed
        that it has no part in; else for all that the device has been given. (A host that waits for
        collectives in any case waits for this one.)
        """
        asked = [i for i, used in enumerate(self._mine) if not used and params[i].grad is not None]
        if asked or not self._by_hosts:
            self._work.wait()
        if not asked:
            return []
        used = Readback(self._flags).get()
        dropped = [place for place in asked if not used[place]]
        for place in dropped:
            params[place].grad = None
        return dropped


class UsedAnywhere:
    """Tells ranks which parameters each of them has used: by their hosts, where these can talk beside their
    devices; else by the devices.

    Args:
        comm: over the ranks that sum these parameters' gradients, all of which make this.
        device: of the parameters.

    Attributes:
        by_hosts: whether hosts talk.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        hosts = comm.between_hosts() if isinstance(comm, HasHosts) else None
        self.by_hosts = hosts is not None
        self._comm = comm if hosts is None else hosts
        self._device = device if hosts is None else HOST

    def tell(self, used: Sequence[bool]) -> Told:
        """Start to tell the other ranks; every one of them does, at this place of its window.

        Args:
            used: by parameter, whether this rank has used it; the same parameters on every rank.

        Cost: an all-reduce of a byte a parameter, between hosts of 4 KiB or a multiple; nobody waits.
        """
        rest = -len(used) % _LENGTH if self.by_hosts else 0
        flags = send([*used, *[False] * rest], torch.uint8, self._device)
        return Told(used, flags, self._comm.all_reduce_max(flags), by_hosts=self.by_hosts)
