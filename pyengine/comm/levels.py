"""Ranks in two levels: the ranks of one host, and the ranks with the same index on all hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pyengine.comm.base import Comm, Hosts
from pyengine.comm.watch.process_state import ProcessId, own_network


def spans_hosts(comm: Comm) -> bool:
    """Whether the ranks of a transport are on several hosts; True where that is not known."""
    return not comm.host_of or len({comm.host_of[rank] for rank in comm.ranks}) > 1


def own_host() -> Hashable:
    """Return an identity of this host, the same for all of its processes."""
    return ProcessId.own().space, own_network()


def by_host(hosts: Sequence[Hashable]) -> Hosts:
    """Return the indices of ranks by host, in the order of their first ranks; `hosts` is by rank."""
    return tuple(
        tuple(rank for rank, host in enumerate(hosts) if host == one) for one in dict.fromkeys(hosts)
    )


def indices_by_host(hosts: Hosts, ranks: Sequence[int]) -> Hosts:
    """Return the indices in `ranks` by host; `hosts` may have other ranks, too.

    Raises:
        ValueError: a rank is on no host, or on two.
    """
    host_of = {rank: index for index, host in enumerate(hosts) for rank in host}
    missing = [rank for rank in ranks if rank not in host_of]
    if missing or len(host_of) < sum(map(len, hosts)):
        why = f"rank {missing[0]} is in none of its rows" if missing else "a rank is in two of its rows"
        raise ValueError(
            f"mesh={[list(host) for host in hosts]}: {why}; need one row a host, and every rank "
            "over which gradients are summed in one row"
        )
    return by_host([host_of[rank] for rank in ranks])


def check_equal(hosts: Hosts) -> None:
    """Raise ValueError where hosts have unequal numbers of ranks."""
    if len({len(host) for host in hosts}) > 1:
        raise ValueError(
            f"the {sum(map(len, hosts))} ranks are {' + '.join(str(len(host)) for host in hosts)} by host: a "
            "wire of two levels needs the same number on every host; start as many on each, or pass mesh= "
            "with rows of equal length"
        )
