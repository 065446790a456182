"""Process groups among the ranks of an engine: found again, or made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pyengine.ops.device import HOST


def group_of(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup | None:
    """Return a group of these ranks for tensors on a device, for which all of them ask in the same order;
    None where it is the default one.
    """
    if list(ranks) == list(range(dist.get_world_size())):
        return None
    return _known_or_new(ranks, "engines", timeout_of(None, device))


def group_beside_ddp(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """Return a group of these ranks that only engines under `attach` use; asked for as `group_of`."""
    return _known_or_new(ranks, "engines beside DDP", timeout_of(None, device))


def group_within(ranks: Sequence[int], parent: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of some ranks of a transport that only the levels of transports of its name use; asked
    for as `group_of`.
    """
    return _known_or_new(ranks, f"levels of {parent}", timeout)


def group_of_hosts(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group of the hosts of another one's ranks, which has gloo for them; asked for as `group_of`.

    It is one for all engines over the other one: where ranks send windows of different engines, what hosts
    tell is paired as their buckets are, and the next window of the same engine with its like.
    """
    parent = c10d._get_default_group() if parent is None else parent
    ranks, limit = dist.get_process_group_ranks(parent), timeout_of(parent, HOST)
    return _known_or_new(ranks, f"hosts of group {parent.group_name}", limit, backend="gloo")


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return what a group, None being the default one, has for a device."""
    group = dist.group.WORLD if group is None else group
    assert group is not None  # there is a default group: it has told our rank
    return group._get_backend(device)


def name_of_backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the name of what a group has for a device: "nccl", say."""
    name: str = backend_of(group, device).name()
    return name.lower()


def has_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether a group has gloo for the hosts' memory, if only beside what devices have."""
    try:
        return name_of_backend(group, HOST) == "gloo"
    except RuntimeError:  # it has nothing for the CPU
        return False


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return after how long a group gives a collective up: torch's default if its backend does not tell."""
    backend = backend_of(group, device)
    try:
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends, and torch 2.9 does not ask the one inside.
        limit: timedelta = getattr(backend, "wrapped_pg", backend).options._timeout
    except (AttributeError, RuntimeError):  # MPI, UCC
        limit = c10d._get_default_timeout(dist.Backend(backend.name().lower()))
    return limit


def give_up_after(limit: timedelta, group: dist.ProcessGroup | None) -> None:
    """Let a group give its collectives up after so long, from here on."""
    c10d._set_pg_timeout(limit, group)


def make(
    what_for: str, ranks: Sequence[int], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a group of these ranks; all of them call this.

    `dist.new_group` has either every rank of the default group take part, or gives a group a name by how many
    groups this rank has, and waits without end where another rank has more. So the name is our own. (The
    calls are private ones of torch; checked against 2.9 to 2.15.)

    Args:
        what_for: it is, in words that no other group of these ranks has.
        ranks: sorted, as the default group has them.
        timeout: of its collectives.
        backend: None takes the default group's, for the same devices; or that of one kind of device.
    """
    everybody = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[everybody]
    carried_by = dist.Backend(default_backend if backend is None else backend)
    name = f"pyengine-{hashlib.sha256(f'{what_for} over {[*ranks]}'.encode()).hexdigest()[:32]}"
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        [*ranks],
        carried_by,
        store,
        name,  # type: ignore[arg-type]  # a str
        timeout=timeout,
        pg_tag=name,  # without one of its own torch finds it for whoever names these ranks
        device_id=everybody.bound_device_id if backend is None else None,
        group_desc=_described(what_for),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _known_or_new(
    ranks: Sequence[int], what_for: str, timeout: timedelta, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return what an earlier engine over these ranks has made, or make it.

    torch keeps every group until the default one ends, so it is torch's own list that is looked through: on
    each of the ranks it has the same ones, since they make them together.
    """
    for group in c10d._world.pg_map:
        if group.group_desc == _described(what_for) and dist.get_process_group_ranks(group) == [*ranks]:
            return group
    return make(what_for, ranks, timeout=timeout, backend=backend)


def _described(what_for: str) -> str:
    return f"pyengine: {what_for}"
