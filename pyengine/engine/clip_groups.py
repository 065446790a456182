"""The groups of `clip_grad_norm_(per=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from torch.nn import Parameter

ClipPer = Literal["parameter"] | Mapping[str, Iterable[str | Parameter]] | None


def checked_groups(
    per: Any, index_of: Mapping[str, int], name_of: Mapping[int, str]
) -> Iterator[tuple[int, ...]]:
    """Yield the indices of each group's parameters.

    Args:
        per: what the user has passed.
        index_of: index by name.
        name_of: name by the identity of a parameter.

    Raises:
        TypeError, ValueError: `per` is no dict of disjoint groups of this engine's parameters.
    """
    if not isinstance(per, Mapping):
        raise TypeError(
            f'per={per!r}: need "parameter", or a dict with the names or parameters of each group, '
            'for example {"head": model.head.parameters()}'
        )
    if not per:
        raise ValueError("per={}: need at least one group; leave per out to clip all parameters together")
    group_of: dict[int, str] = {}
    for group, members in per.items():
        if isinstance(members, str | Parameter) or not isinstance(members, Iterable):
            raise TypeError(
                f"per[{group!r}] is a {type(members).__name__}: need a list of names or parameters"
            )
        indices = []
        for member in members:
            name = member if isinstance(member, str) else name_of.get(id(member))
            index = None if name is None else index_of.get(name)
            if index is None:
                what = repr(member) if isinstance(member, str) else f"a {type(member).__name__}"
                some = ", ".join(map(repr, [*index_of][:3]))
                raise ValueError(
                    f"per[{group!r}] has {what}, which is no parameter of this engine: need {some}, ..."
                )
            if index in group_of:
                raise ValueError(
                    f"per[{group!r}] has {name!r}, which is in group {group_of[index]!r} already: need "
                    "groups without a common parameter"
                )
            group_of[index] = group
            indices.append(index)
        if not indices:
            raise ValueError(
                f"per[{group!r}] is empty: leave the group out (an iterator can be read only once)"
            )
        yield tuple(indices)
