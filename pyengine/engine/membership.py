"""Where one rank stands among the ranks of its engine: what it says of that, and what others must say
alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pyengine.gradients.layout import ParamSpec, first_difference
from pyengine.window.shared_batch import SharedBatch


@dataclass(frozen=True)
class Membership:
    """What one rank says of its groups. Ranks are those of the engine, from 0.

    Attributes:
        described: the mesh and its axes, in words; the same on every rank.
        groups: the ranks over which gradients are summed, by `ParamSpec.group`.
        batch: which batch this rank computes, and with whom.
        num_batches: over all ranks.
        unmatched: patterns of `Axes.groups` that no parameter here matches.
        counted: by parameter, whether this rank counts it in the norm; None: all ranks hold the same.
    """

    described: str
    groups: tuple[tuple[int, ...], ...]
    batch: SharedBatch
    num_batches: int
    unmatched: tuple[str, ...] = ()
    counted: tuple[bool, ...] | None = None

    @classmethod
    def plain(cls, *, rank: int, world_size: int) -> Membership:
        """Return that of a rank whose parameters are those of all ranks, and whose batch is its own."""
        return cls("", (tuple(range(world_size)),), SharedBatch(rank, 1, True), world_size)


def memberships_differ(said: Sequence[Membership], specs: Sequence[Sequence[ParamSpec]]) -> list[str]:
    """Say in what ranks do not fit together.

    Args:
        said: by rank.
        specs: by rank, its parameters in registration order.
    """
    described = [membership.described for membership in said]
    if len(set(described)) > 1:
        values = "; ".join(f"rank {rank} has {text or 'no mesh'}" for rank, text in enumerate(described))
        return [f"ranks have different meshes or axes: {values}. Pass the same ones on every rank"]
    for pattern in said[0].unmatched:
        if all(pattern in membership.unmatched for membership in said):
            return [
                (
                    f"axes.groups[{pattern!r}] matches no parameter on any rank (the first is "
                    f"{specs[0][0].name!r}): patterns are of whole names, as fnmatch has them"
                )
            ]
    members: dict[tuple[int, ...], dict[int, list[ParamSpec]]] = {}
    for rank, (membership, mine) in enumerate(zip(said, specs, strict=True)):
        for index, ranks in enumerate(membership.groups):
            members.setdefault(ranks, {})[rank] = [spec for spec in mine if spec.group == index]
    return [text for ranks, have in members.items() if (text := _difference(ranks, have))]


def most_parts(said: Sequence[Membership]) -> int:
    """Return how many ranks of one group share a batch, at most: each adds its own part of the gradient.

    Args:
        said: by rank.
    """
    groups = {ranks for membership in said for ranks in membership.groups}
    return max(max(Counter(said[rank].batch.index for rank in ranks).values()) for ranks in groups)


def _difference(ranks: Sequence[int], have: dict[int, list[ParamSpec]]) -> str:
    """Say in what the ranks of one group differ; nothing if they do not."""
    missing = [rank for rank in ranks if rank not in have]
    if missing:
        first, others = next(iter(have)), ", ".join(map(str, missing))
        return (
            f"rank {first} sums gradients over ranks {list(ranks)}, and rank {others} of them does not: "
            "give every rank of a group that group"
        )
    difference = first_difference([have[rank] for rank in ranks], ranks)
    if difference is None:
        return ""
    return (
        f"params_or_module differs between ranks: {difference}. Build the same model, in the same order, on "
        "every rank"
    )
