"""The process groups of an engine's ranks: how they are created, held and destroyed.

[Note: an engine's own group]
A backend matches the collectives of a group by their order on each rank. If the host waits for collectives,
an engine launches its buckets when the window's header has arrived, which happens earlier on some ranks than
on others. If the user (in the backward) or a second engine launched another collective on the same group, a
rank could match it with a bucket of another rank, and their values would be added together. To prevent this,
every engine creates a group for its buckets that no other code uses, and destroys the group when the engine
is closed or freed.

[Note: destroying a group]
The ranks of a group destroy their handles at different times. This is safe, because a collective that has
completed on a rank needs nothing more from this rank. The threads of a gloo group end when the last reference
to the group is dropped. Dropping it waits for pending collectives, up to their timeout. Therefore a separate
thread drops the last reference, and the caller waits at most a second for this thread.
"""

from __future__ import annotations

import _thread
import hashlib
import logging
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pyengine.ops.device import HOST

_log = logging.getLogger("pyengine.comm")

_DESTROY_S = 1.0  # maximum time that `destroy` waits for its thread

# ---- groups that several engines share ----


def group_of(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup | None:
    """Return a group of these ranks for tensors on a device, or None for the default group.

    All of these ranks must call this function. For several groups, they must call it in the same order.
    """
    if list(ranks) == list(range(dist.get_world_size())):
        return None
    return find_or_make(ranks, "engines", timeout_of(None, device))


def group_of_hosts(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a gloo group of the ranks of another group; the same rules as for `group_of` apply.

    All engines over `parent` share this group. If ranks send windows of different engines, the collectives of
    these windows are matched with each other in this group, as they are in the group of the buckets. The next
    window that all ranks send with the same engine is matched correctly again.
    """
    parent = group_or_default(parent)
    ranks, limit = dist.get_process_group_ranks(parent), timeout_of(parent, HOST)
    return find_or_make(ranks, f"hosts of group {parent.group_name}", limit, backend="gloo")


def find_or_make(
    ranks: Sequence[int], purpose: str, timeout: timedelta, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return the group that an earlier engine over these ranks has created, or create the group.

    The same rules as for `group_of` apply. This function searches torch's list of groups. All of these ranks
    create their common groups together, so every rank finds the same groups.
    """
    for group in [*c10d._world.pg_map]:  # use a copy: a garbage collection may destroy a group
        if group.group_desc == f"pyengine: {purpose}" and dist.get_process_group_ranks(group) == [*ranks]:
            _log.debug("reuse process group for %s over ranks %s", purpose, ranks)
            return group
    return make(purpose, ranks, timeout=timeout, backend=backend)


# ---- properties of a group ----


def ranks_of(group: dist.ProcessGroup, what: str) -> tuple[int, ...]:
    """Return the ranks of the group in which `what` will run; raise RuntimeError if it has been destroyed."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise RuntimeError(
            f"set up the process group, the model and the engine again: {what} was to run in a process group "
            "that has been destroyed (destroy_process_group)"
        ) from None


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return c10d._get_default_group() if group is None else group


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return the backend of a group for a device. `group=None` means the default group."""
    return group_or_default(group)._get_backend(device)


def name_of_backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    name: str = backend_of(group, device).name()
    return name.lower()


def has_gloo(group: dist.ProcessGroup | None) -> bool:
    try:
        return name_of_backend(group, HOST) == "gloo"
    except RuntimeError:  # the group has no backend for the CPU
        return False


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives, or torch's default if the backend does not report it."""
    backend = backend_of(group, device)
    try:
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends, and in torch 2.9 the wrapper does not return the
        # timeout of the wrapped backend.
        limit: timedelta = getattr(backend, "wrapped_pg", backend).options._timeout
    except (AttributeError, RuntimeError):  # MPI and UCC do not report it
        limit = c10d._get_default_timeout(dist.Backend(backend.name().lower()))
    return limit


# ---- creation and destruction of a group ----


def make(
    purpose: str, ranks: Sequence[int], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group of these ranks; all of these ranks must call this.

    By default, `dist.new_group` must be called on every rank of the default group. With
    `use_local_synchronization=True` only the members call it, but torch then names the group by the number of
    groups on this rank, and hangs if this number differs between ranks. Therefore this function chooses the
    name, with private functions of torch that were checked in torch 2.9 to 2.15.

    Args:
        purpose: description that no other group of these ranks has ever had.
        ranks: sorted ranks, as the default group numbers them.
        backend: name of the backend for one kind of device; None uses the default group's backends.
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
        pg_tag=name,  # without a unique tag, torch returns this group to other code
        device_id=default_group.bound_device_id if backend is None else None,
        group_desc=f"pyengine: {purpose}",
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    # torch names groups with `use_local_synchronization=True` by the number of entries in `pg_names`, which
    # has to be equal on every rank.
    del c10d._world.pg_names[group]
    _log.debug("make process group for %s over ranks %s, timeout %s", purpose, ranks, timeout)
    return group


def destroy(reference: weakref.ref[dist.ProcessGroup], pid: int) -> None:
    """Destroy this rank's handle of a group; may be called during garbage collection.

    See [Note: destroying a group].
    """
    group = reference()
    if group is None or group not in c10d._world.pg_map or os.getpid() != pid:  # a fork has no such threads
        return
    c10d._world.pg_names[group] = group.group_name  # `make` explains this
    dist.destroy_process_group(group)
    _log.debug("destroyed process group for %s", group.group_desc)
    held, is_freed = [group], _thread.allocate_lock()
    is_freed.acquire()
    del group

    def free() -> None:
        held.clear()
        is_freed.release()

    _thread.start_new_thread(free, ())  # threading.Thread takes a lock that this thread may already hold
    is_freed.acquire(timeout=_DESTROY_S)


class GroupHandle:
    """A weak reference to a process group, for use by transports.

    A strong reference to a destroyed group would keep its threads alive.

    Args:
        is_own: whether the group belongs to an engine and is destroyed when this object is released or freed.
        leader: handle of the group whose timeout is applied to this group. If None, this group keeps its own
            timeout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        is_own: bool = False,
        leader: GroupHandle | None = None,
    ) -> None:
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self._group = None if group is None else weakref.ref(group)
        self._device = device  # device of the tensors; a group has a backend for each kind of device
        self._leader = leader
        self._destroy = None
        if is_own and self._group is not None:
            self._destroy = weakref.finalize(self, destroy, self._group, os.getpid())
            self._destroy.atexit = False  # no thread can be started at interpreter exit

    def get(self) -> dist.ProcessGroup | None:
        if self._group is None:
            return None
        found = self._group()
        if found is None or (self._destroy is not None and not self._destroy.alive):
            raise RuntimeError(
                f"make a new engine: the process group over ranks {[*self.ranks]} has been destroyed "
                "(destroy_process_group, or sync.close())"
            )
        return found

    def timeout(self) -> timedelta:
        """Return the timeout of the engine's group, which the user may change at any time."""
        return timeout_of(self.get(), self._device) if self._leader is None else self._leader.timeout()

    def apply_timeout(self) -> None:
        """Apply the timeout of the engine's group to the next collective."""
        if self._leader is not None:
            group = self.get()
            if (limit := self.timeout()) != timeout_of(group, self._device):
                c10d._set_pg_timeout(limit, group)

    def release(self) -> None:
        if self._destroy is not None:
            self._destroy()
