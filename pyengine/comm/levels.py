"""Ranks in two levels: those of one host, and those of the same place on all hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pyengine.comm.base import Comm, Hosts
from pyengine.comm.watch.process_state import ProcessId, own_network


def spans_hosts(comm: Comm) -> bool:
    """Whether the ranks of a transport are on several hosts; True where that is not known."""
    return not comm.host_of or len({comm.host_of[rank] for rank in comm.ranks}) > 1


def own_host() -> Hashable:
    """Return what processes of this host have in common, and those of no other host."""
    return ProcessId.own().space, own_network()


def by_host(hosts: Sequence[Hashable]) -> Hosts:
    """Return the indices of ranks by host, in the order of their first ranks; `hosts` is by rank."""
    return tuple(
        tuple(rank for rank, host in enumerate(hosts) if host == one) for one in dict.fromkeys(hosts)
    )


def given(hosts: Hosts, ranks: Sequence[int]) -> Hosts:
    """Return those of given hosts as indices in `ranks`, which may be some of their ranks only.

    Raises:
        ValueError: a rank is on none of them, or on two.
    """
    host_of = {rank: index for index, host in enumerate(hosts) for rank in host}
    strange = [rank for rank in ranks if rank not in host_of]
    if strange or len(host_of) < sum(map(len, hosts)):
        why = f"rank {strange[0]} is in none of its rows" if strange else "a rank comes twice"
        raise ValueError(
            f"mesh={[list(host) for host in hosts]}: {why}; give every rank over which gradients are summed "
            "one place, a row a host"
        )
    return by_host([host_of[rank] for rank in ranks])


def check_equal(hosts: Hosts) -> None:
    """Raise ValueError where hosts have unequal numbers of ranks."""
    if len({len(host) for host in hosts}) > 1:
        raise ValueError(
            f"the {sum(map(len, hosts))} ranks are {' + '.join(str(len(host)) for host in hosts)} by host: a "
            "wire of two levels needs equally many on every host; start as many everywhere, or pass "
            "mesh=, rows of as many ranks"
        )
