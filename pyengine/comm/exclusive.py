"""Process groups that one engine at a time uses, and nothing else.

A backend pairs the collectives of a group by their order on each rank. Where the host waits for collectives,
an engine's buckets leave when the window's header has come, which is sooner on one rank than on another: any
other collective of that group, one of the user's in the backward or a second engine's, would be paired with
a bucket, and the two added up. So buckets travel by a group that nothing else uses.

torch keeps every group until the default one ends, so a group serves the next engine once nobody uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pyengine.comm.groups import make


@dataclass
class Usage:
    """How such a group is used on this rank.

    Attributes:
        ranks: of the group, as the default group has them.
        backend: that carries it.
        number: the same on every rank; no other group of these ranks and this backend has it.
        users: transports by it, and by levels of it, until they are released or gone.
        launched: how many collectives this rank has started in it: where ranks differ, what one of them
            starts next would be paired with something that another has started before.
        is_broken: whether a collective by it has failed.
    """

    ranks: tuple[int, ...]
    backend: str
    number: int
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    launched: int = 0
    is_broken: bool = False

    @property
    def name(self) -> str:
        return f"buckets of one engine, {self.backend}, {self.number}"


@dataclass(frozen=True)
class Offer:
    """What a rank says before an engine takes a group.

    Attributes:
        unused: by number, how many collectives this rank has started in each group that could serve again.
        next_number: of a group that this rank would make.
    """

    unused: Mapping[int, int]
    next_number: int


# By group; torch's own list of groups is what keeps them.
_usages: weakref.WeakKeyDictionary[dist.ProcessGroup, Usage] = weakref.WeakKeyDictionary()


def usage_of(group: dist.ProcessGroup | None) -> Usage | None:
    """Return how a group that was made for one engine is used; None for any other group."""
    return None if group is None else _usages.get(group)


def offer(ranks: Sequence[int], backend: str) -> Offer:
    """Return what this rank says of the groups of these ranks over a backend."""
    usages = [usage for _, usage in _made(ranks, backend)]
    return Offer(
        {usage.number: usage.launched for usage in usages if not usage.users and not usage.is_broken},
        1 + max((usage.number for usage in usages), default=-1),
    )


def take(
    ranks: Sequence[int], backend: str, offers: Sequence[Offer], timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group of these ranks that is unused on all of them and in which they have started as many
    collectives, or make it; all of them call this.

    Args:
        ranks: sorted, as the default group has them.
        offers: of all of them.
        timeout: of a group that has to be made.
    """
    numbers = [n for n, m in offers[0].unused.items() if all(each.unused.get(n) == m for each in offers)]
    if numbers:
        return next(group for group, usage in _made(ranks, backend) if usage.number == min(numbers))
    usage = Usage(tuple(ranks), backend, max(each.next_number for each in offers))
    group = make(usage.name, ranks, backend=backend, timeout=timeout)
    _usages[group] = usage
    return group


def _made(ranks: Sequence[int], backend: str) -> Iterator[tuple[dist.ProcessGroup, Usage]]:
    for group in c10d._world.pg_map:
        usage = _usages.get(group)
        if usage is not None and (usage.ranks, usage.backend) == (tuple(ranks), backend):
            yield group, usage
