"""Ranks in two levels: those of one host, and those of the same place on all hosts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.comm.process_state import ProcessId, own_network

# Ranks by host; whatever "host" stands for, an island of a fast network say.
Hosts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Levels:
    """Transports of a rank in two levels.

    Attributes:
        inside: over the ranks of its host.
        across: over the ranks of its place on every host; over itself where a smaller host has no such place.
        num_places: ranks of the smallest host, each of which sums a part across hosts.
    """

    inside: Comm
    across: Comm
    num_places: int

    def part_of(self, numel: int) -> slice:
        """Return the elements of a bucket that this rank sums across hosts."""
        size, place = -(-numel // self.num_places), self.inside.rank
        if not self.is_across:
            return slice(0, 0)
        return slice(min(place * size, numel), min((place + 1) * size, numel))

    @property
    def is_across(self) -> bool:
        """Whether this rank sums a part across hosts."""
        return self.inside.rank < self.num_places


@runtime_checkable
class HasLevels(Protocol):
    """A transport whose ranks can be taken in two levels."""

    def levels(self, hosts: Hosts | None = None) -> Levels:
        """Return the two, made at the first call, which every rank of the transport makes.

        Args:
            hosts: ranks of the default group by host, all of which have equally many here; None: as the
                machine has them.

        Raises:
            ValueError: on every rank: they have not, or a rank is on none.
        """


@runtime_checkable
class SharesParts(Protocol):
    """A transport that can complete a buffer of which every rank has a part, in memory that all of them
    see.
    """

    def share_part(self, flat: Tensor, part: slice) -> Work:
        """Start to let every rank have all parts.

        Args:
            flat: `[numel]`, of the same dtype on every rank; of it `part` is read, and the rest written.
            part: this rank's; those of all ranks do not overlap. What is in none becomes 0.
        """


@runtime_checkable
class KnowsHosts(Protocol):
    """A transport that is told which ranks are of one host.

    Attributes:
        ranks: its own, as the default group has them.
        host_of: hosts by rank; empty until somebody has told it.
    """

    ranks: tuple[int, ...]
    host_of: Mapping[int, Hashable]


def spans_hosts(comm: Comm) -> bool:
    """Whether a transport's ranks are of several hosts; so they are taken for where that is not known."""
    if not isinstance(comm, KnowsHosts) or not comm.host_of:
        return True
    return len({comm.host_of[rank] for rank in comm.ranks}) > 1


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
