"""Process groups among the ranks of an engine: how they are made, found again, held and used again.

torch keeps every group until the default one ends (`destroy_process_group`), so nothing here destroys one. A
group that an engine has left serves a later engine.

[Note: an engine's own group]
A backend pairs the collectives of a group by their order on each rank. Where the host waits for collectives,
an engine launches its buckets when the window's header has arrived, which is sooner on one rank than on
another. Any other collective of that group, by the user in the backward or by a second engine, would be
paired with a bucket, and the two would be added up. So buckets use a group that no other code uses.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pyengine.ops.device import HOST

_log = logging.getLogger("pyengine.comm")

# ---- groups that several engines share ----


def group_of(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup | None:
    """Return a group of these ranks for tensors on a device; None where it is the default group.

    All of the ranks call this, in the same order for different groups.
    """
    if list(ranks) == list(range(dist.get_world_size())):
        return None
    return find_or_make(ranks, "engines", timeout_of(None, device))


def group_of_hosts(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a gloo group of the hosts of another group's ranks; called as `group_of`.

    All engines over `parent` share it: if ranks send windows of different engines, the collectives of hosts
    are paired as the buckets are, and the next window of the same engine is paired right again.
    """
    parent = group_or_default(parent)
    ranks, limit = dist.get_process_group_ranks(parent), timeout_of(parent, HOST)
    return find_or_make(ranks, f"hosts of group {parent.group_name}", limit, backend="gloo")


def find_or_make(
    ranks: Sequence[int], purpose: str, timeout: timedelta, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return the group that an earlier engine over these ranks has made, or make it; called as `group_of`.

    torch's own list of groups is searched: it holds the same ones on each of the ranks, which make them
    together.
    """
    for group in c10d._world.pg_map:
        if group.group_desc == f"pyengine: {purpose}" and dist.get_process_group_ranks(group) == [*ranks]:
            _log.debug("reuse process group for %s over ranks %s", purpose, ranks)
            return group
    return make(purpose, ranks, timeout=timeout, backend=backend)


# ---- facts about a group ----


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return c10d._get_default_group() if group is None else group


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return the backend that a group has for a device; None is the default group."""
    return group_or_default(group)._get_backend(device)


def name_of_backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    name: str = backend_of(group, device).name()
    return name.lower()


def has_gloo(group: dist.ProcessGroup | None) -> bool:
    try:
        return name_of_backend(group, HOST) == "gloo"
    except RuntimeError:  # it has no backend for the CPU
        return False


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives; torch's default if the backend does not report it."""
    backend = backend_of(group, device)
    try:
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends, and torch 2.9 does not ask the one inside.
        limit: timedelta = getattr(backend, "wrapped_pg", backend).options._timeout
    except (AttributeError, RuntimeError):  # MPI, UCC
        limit = c10d._get_default_timeout(dist.Backend(backend.name().lower()))
    return limit


# ---- making a group ----


def make(
    purpose: str, ranks: Sequence[int], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a group of these ranks; all of them call this.

    `dist.new_group` either needs every rank of the default group, or names a group by how many groups this
    rank has, and waits forever where another rank has more. So the name is our own. (The calls are private
    ones of torch; checked against 2.9 to 2.15.)

    Args:
        purpose: description that no other group of these ranks has.
        ranks: sorted, as the default group numbers them.
        backend: None: that of the default group, for the same devices; or the backend of one kind of device.
    """
    default_group = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[default_group]
    name = f"pyengine-{hashlib.sha256(f'{purpose} over {[*ranks]}'.encode()).hexdigest()[:32]}"
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        [*ranks],
        dist.Backend(default_backend if backend is None else backend),
        store,
        name,  # type: ignore[arg-type]  # a str
        timeout=timeout,
        pg_tag=name,  # without a tag of its own torch returns this group to whoever names these ranks
        device_id=default_group.bound_device_id if backend is None else None,
        group_desc=f"pyengine: {purpose}",
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    _log.debug("make process group for %s over ranks %s, timeout %s", purpose, ranks, timeout)
    return group


# ---- groups that one engine at a time uses: see [Note: an engine's own group] ----


@dataclass
class GroupUsage:
    """How an engine's own group is used on this rank."""

    ranks: tuple[int, ...]  # as the default group numbers them
    backend: str
    number: int  # the same on every rank; no other group of these ranks and this backend has it
    # Handles of this group and of groups of its levels, until they are released or freed.
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    # Collectives that this rank has launched. Where the number differs between ranks, the next collective of
    # one rank would be paired with an earlier one of another.
    launched: int = 0
    is_broken: bool = False  # whether a collective has failed

    @property
    def name(self) -> str:
        return f"buckets of one engine, {self.backend}, {self.number}"


@dataclass(frozen=True)
class GroupOffer:
    """What one rank offers before an engine chooses its own group."""

    unused: Mapping[int, int]  # launched collectives of each group that could be used again, by its number
    next_number: int  # of a group that this rank would make


# By group; torch's own list of groups keeps the keys alive.
_usages: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupUsage] = weakref.WeakKeyDictionary()


def offer_groups(ranks: Sequence[int], backend: str) -> GroupOffer:
    usages = [usage for _, usage in _own_groups(ranks, backend)]
    return GroupOffer(
        {usage.number: usage.launched for usage in usages if not usage.users and not usage.is_broken},
        1 + max((usage.number for usage in usages), default=-1),
    )


def choose_own_group(
    ranks: Sequence[int], backend: str, offers: Sequence[GroupOffer], timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group of these sorted ranks that is unused on all of them, or make it; all of them call this.

    The ranks have launched equally many collectives in it.
    """
    numbers = [n for n, m in offers[0].unused.items() if all(each.unused.get(n) == m for each in offers)]
    if numbers:
        _log.debug("reuse process group %d for buckets of one engine over ranks %s", min(numbers), ranks)
        return next(group for group, usage in _own_groups(ranks, backend) if usage.number == min(numbers))
    usage = GroupUsage(tuple(ranks), backend, max(each.next_number for each in offers))
    group = make(usage.name, ranks, backend=backend, timeout=timeout)
    _usages[group] = usage
    return group


def _own_groups(ranks: Sequence[int], backend: str) -> Iterator[tuple[dist.ProcessGroup, GroupUsage]]:
    for group in c10d._world.pg_map:
        usage = _usages.get(group)
        if usage is not None and (usage.ranks, usage.backend) == (tuple(ranks), backend):
            yield group, usage


class GroupHandle:
    """A process group as one transport holds it: it does not keep the group alive.

    Whoever holds a group beyond its end keeps its threads.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.usage = None if group is None else _usages.get(group)  # of this group, if it is an engine's own
        # Distinguishes the levels of this group from those of others.
        self.name = f"ranks {[*self.ranks]}" + ("" if self.usage is None else f", {self.usage.name}")
        self._group = None if group is None else weakref.ref(group)
        self._device = device  # of the tensors; a group has a backend for each kind of device
        self._leader: GroupHandle | None = None  # of the engine's group, whose timeout this group gets
        self._follows_timeout = False  # also where the group is not an engine's own
        # Of the engine's own group that `release` gives back: this one, or the one that this is a level of.
        self.kept: GroupUsage | None = None
        self._keep(self.usage)

    def get(self) -> dist.ProcessGroup | None:
        if self._group is None:
            return None
        found = self._group()
        if found is None:
            raise RuntimeError(
                f"make the engine anew: the process group of its ranks {[*self.ranks]} has been destroyed "
                "(destroy_process_group)"
            )
        return found

    def follow(self, other: GroupHandle, *, timeout: bool = False) -> None:
        """Use the timeout of another handle's engine, and keep that engine's own group in use.

        With `timeout`, use that of `other` itself, also where neither group is an engine's own.
        """
        self._leader = other if timeout else other._leader or other
        self._follows_timeout = self._follows_timeout or timeout
        if other.kept is not None:
            self._keep(other.kept)

    def timeout(self) -> timedelta:
        """Return the timeout of collectives: that of the engine's group, which the user may set any time."""
        return timeout_of((self._leader or self).get(), self._device)

    def count_launch(self) -> None:
        """Count a collective that is about to start, and give it the timeout of the engine's group."""
        if self.kept is not None or self._follows_timeout:
            group = self.get()
            if (limit := self.timeout()) != timeout_of(group, self._device):
                c10d._set_pg_timeout(limit, group)
        if self.usage is not None:
            self.usage.launched += 1

    def release(self) -> None:
        """Let a later engine use the group."""
        if self.kept is not None and self in self.kept.users:
            self.kept.users.discard(self)
            _log.debug("release process group for %s over ranks %s", self.kept.name, self.ranks)

    def _keep(self, usage: GroupUsage | None) -> None:
        self.kept = usage
        if usage is not None:
            usage.users.add(self)
