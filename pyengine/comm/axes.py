"""The axes of a device mesh: their roles (replicas, shards and counts), and the ranks along them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Names = str | tuple[str, ...]


@dataclass(frozen=True)
class Axes:
    """The roles of the axes of a `device_mesh`; each argument is an axis name or a tuple of axis names.

    Args:
        replicate: ranks along these axes hold the same parameters and have different data (or different parts
            of it). Gradients are summed over these axes. Default: the only axis of a one-dimensional mesh.
        shard: ranks along these axes hold different plain parameters (the stages of a pipeline). Axes of
            DTensors need not be named, because their placements define them. Along an axis in neither
            `replicate` nor `shard`, ranks hold the same plain parameters and compute the same gradients for
            them (tensor parallelism).
        count: ranks along these axes count different items; ranks along all other axes share a batch, whose
            count is added only once. Default: the axes of `replicate`.
        groups: maps patterns of parameter names, as in `fnmatch`, to the axes over which the gradients of
            these parameters are summed instead. The first matching pattern is used. An empty tuple means no
            axes. Without a mesh, each value is a process group. Ranks of different groups hold different
            parameters, for example experts.

    Example:
        >>> Axes(replicate=("dp", "cp"), count="dp")
        Axes(replicate=('dp', 'cp'), shard=(), count='dp', groups={})
        >>> Axes(replicate=("edp", "ep"), groups={"*.experts.*": "edp"}).groups
        {'*.experts.*': 'edp'}
    """

    replicate: Names = ()
    shard: Names = ()
    count: Names | None = None
    groups: Mapping[str, Names | dist.ProcessGroup] = field(default_factory=dict)


class MeshRanks:
    """The ranks of a mesh, relative to this rank. An axis without a name is identified by its index."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks = mesh.mesh
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        coordinate: Any = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                f"device_mesh: rank {dist.get_rank()} is not in the mesh, which has the ranks "
                f"{mesh.mesh.flatten().tolist()}; make the engine only on ranks of the mesh"
            )
        self.shape = dict(zip(names, mesh.mesh.shape, strict=True))
        self.coordinate: dict[str, int] = dict(zip(names, coordinate, strict=True))

    def along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return this rank and all ranks that differ from it only along `axes`, as sorted global ranks."""
        index = tuple(slice(None) if name in axes else at for name, at in self.coordinate.items())
        return tuple(sorted(self._ranks[index].flatten().tolist()))

    def all_ranks(self) -> tuple[int, ...]:
        return self.along([*self.shape])

    def index(self, axes: Sequence[str]) -> int:
        """Return the flattened index of this rank along `axes`."""
        index = 0
        for name in axes:
            index = index * self.shape[name] + self.coordinate[name]
        return index

    def size(self, axes: Sequence[str]) -> int:
        return len(self.along(axes))

    def axis_of(self, mesh: DeviceMesh, dim: int) -> str | None:
        """Return the axis of this mesh that has the same ranks as dimension `dim` of `mesh`, or None.

        A dimension with one rank matches any axis; in this case the result is "".
        """
        other = MeshRanks(mesh)
        ranks = other.along([[*other.shape][dim]])
        if len(ranks) == 1:
            return ""
        return next((name for name in self.shape if self.along([name]) == ranks), None)


def as_tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def axes_problems(axes: Axes, shape: Mapping[str, int]) -> list[str]:
    known = ", ".join(f"{name!r} ({size})" for name, size in shape.items())
    found = []
    for where, names in _named(axes):
        unknown = [name for name in names if name not in shape]
        if unknown:
            found.append(f"axes.{where}={unknown[0]!r}: not an axis of device_mesh, which has {known}")
        if len(set(names)) < len(names):
            found.append(f"axes.{where}={names!r}: an axis is named twice; name each axis once")
    both = set(as_tuple(axes.replicate)) & set(as_tuple(axes.shard))
    if both:
        found.append(
            f"axes: {min(both)!r} is in both replicate and shard; an axis can be in only one of them"
        )
    return found


def has_group(name: str, axes: Any) -> bool:
    """Whether a pattern of `Axes.groups` matches a parameter name; False if `axes` is not an `Axes`."""
    return isinstance(axes, Axes) and any(fnmatchcase(name, pattern) for pattern in axes.groups)


def process_groups(groups: Mapping[str, Any]) -> list[str]:
    """Describe the values of `Axes.groups` that are not process groups; used when there is no mesh."""
    return [
        (
            f"axes.groups[{pattern!r}]={group!r}: expected a torch.distributed.ProcessGroup of this "
            "rank; names of axes require a device_mesh"
        )
        for pattern, group in groups.items()
        if not isinstance(group, dist.ProcessGroup)
    ]


def _named(axes: Axes) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "replicate", as_tuple(axes.replicate)
    yield "shard", as_tuple(axes.shard)
    yield "count", as_tuple(axes.count or ())
    for pattern, names in axes.groups.items():
        yield (
            f"groups[{pattern!r}]",
            as_tuple(names) if isinstance(names, str | tuple | list) else (str(names),),
        )


def num_ranks(group: Any) -> int | None:
    """Return the size of `group`, or None if it is not a process group.

    `group=None` means the default group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group.size()
    return dist.get_world_size() if group is None and dist.is_initialized() else None
