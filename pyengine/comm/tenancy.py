"""Process groups that one engine has to itself.

A backend pairs the collectives of a group by their order on each rank. Where the host waits for collectives,
an engine's buckets leave when the window's header has come, which is sooner on one rank than on another: any
other collective of that group, one of the user's in the backward or a second engine's, would be paired with
a bucket, and the two added up. So buckets travel by a group that nothing else uses.

torch keeps every group until the default one ends, so a group serves the next engine once nobody uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pyengine.comm.groups import made_for, make

_FOR = "buckets of one engine"


@dataclass
class Tenancy:
    """Who uses such a group.

    Attributes:
        name: of the group, among those over the same ranks.
        users: transports by it, until they are released or gone.
        launched: how many collectives this rank has started in it: where ranks differ, what one of them
            starts next would be paired with something that another has started before.
    """

    name: str
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    launched: int = 0


# By group; torch's own list of groups is what keeps them.
_tenancies: weakref.WeakKeyDictionary[dist.ProcessGroup, Tenancy] = weakref.WeakKeyDictionary()


def tenancy_of(group: dist.ProcessGroup | None) -> Tenancy | None:
    """Return who uses a group that was made for one engine; None for any other group."""
    return None if group is None else _tenancies.get(group)


def spare(ranks: Sequence[int]) -> dict[int, int]:
    """Return how many collectives this rank has started in each group of these ranks that nobody uses here,
    by the group's number, which is the same on all of them.
    """
    return {
        number: tenancy.launched
        for number, group in enumerate(made_for(_FOR, ranks))
        if not (tenancy := _tenancies[group]).users
    }


def move_in(
    ranks: Sequence[int], said: Sequence[Mapping[int, int]], *, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group of these ranks that nobody uses on any of them, or make it; all of them call this.

    Args:
        ranks: sorted.
        said: what `spare` has returned on each of them.
        backend, timeout: of a group that has to be made.
    """
    for number, launched in said[0].items():
        if all(each.get(number) == launched for each in said):
            return [*made_for(_FOR, ranks)][number]
    name = f"{_FOR}, {sum(1 for _ in made_for(_FOR, ranks))}"
    group = make(_FOR, ranks, backend=backend, timeout=timeout)
    _tenancies[group] = Tenancy(name)
    return group
