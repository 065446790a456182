"""Process groups among the ranks of an engine: found again, or made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a group of these ranks, for which all of them ask; None where it is the default one."""
    return None if list(ranks) == list(range(dist.get_world_size())) else _known_or_new(ranks, "engines")


def group_within(ranks: Sequence[int], parent: str) -> dist.ProcessGroup:
    """Return a group of some ranks of a transport, for which all of them ask, that only the levels of
    transports of its name use.
    """
    return _known_or_new(ranks, f"levels of {parent}")


def made_for(what_for: str, ranks: Sequence[int]) -> Iterator[dist.ProcessGroup]:
    """Go through the groups that were made for something over these ranks, in the order of making.

    torch keeps every group until the default one ends, so it is torch's own list that is looked through: on
    each of the ranks it has the same ones, since they make them together.
    """
    described = _described(what_for)
    for group in c10d._world.pg_map:
        if group.group_desc == described and dist.get_process_group_ranks(group) == [*ranks]:
            yield group


def make(
    what_for: str, ranks: Sequence[int], *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make one more group over these ranks; all of them call this.

    `dist.new_group` has either every rank of the default group take part, or gives a group a name by how many
    groups this rank has, and waits for ever where another rank has more. So the name is of our own here. (The
    calls are private ones of torch; checked against 2.9 to 2.15.)

    Args:
        what_for: it is; `made_for` finds it by that.
        ranks: sorted, as the default group has them.
        backend, timeout: as for `dist.new_group`.
    """
    everybody = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[everybody]
    backend = default_backend if backend is None else backend
    number = sum(1 for _ in made_for(what_for, ranks))
    said = f"{what_for}, {number} over {[*ranks]}"
    name = f"pyengine-{hashlib.sha256(said.encode()).hexdigest()[:32]}"
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        [*ranks],
        dist.Backend(backend),
        store,
        name,  # type: ignore[arg-type]  # a str
        timeout=c10d._get_default_timeout(dist.Backend(backend)) if timeout is None else timeout,
        pg_tag=name,  # by the tag of others torch would lend it to whoever names these ranks
        device_id=everybody.bound_device_id,
        group_desc=_described(what_for),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _known_or_new(ranks: Sequence[int], what_for: str) -> dist.ProcessGroup:
    """Return what an earlier engine over these ranks has made, or make it."""
    return next(made_for(what_for, ranks), None) or make(what_for, ranks)


def _described(what_for: str) -> str:
    return f"pyengine: {what_for}"
