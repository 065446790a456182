"""On any mesh, exactly one rank counts each element in a norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pyengine.comm.axes import Axes, MeshRanks
from pyengine.engine.engine_ranks import EngineRanks, Membership, ShardedRanks

AXES = ("a", "b", "c")
Place = dict[str, int]


@dataclass(eq=False)
class Mesh:
    """A rank's `DeviceMesh`, without processes."""

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...]
    place: Sequence[int]

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, dim: int | None = None) -> int:
        return self.mesh.numel() if dim is None else self.mesh.shape[dim]

    def get_coordinate(self) -> list[int]:
        return [*self.place]


def _ranks(shape: Mapping[str, int]) -> Iterator[Place]:
    for place in itertools.product(*map(range, shape.values())):
        yield dict(zip(shape, place, strict=True))


def _mesh(shape: Mapping[str, int], place: Place, names: Sequence[str]) -> Mesh:
    """Return the submesh along `names` that contains the rank at `place`."""
    whole = torch.arange(math.prod(shape.values())).view(*shape.values())
    part = whole[tuple(slice(None) if name in names else place[name] for name in shape)]
    return Mesh(part, tuple(names), [place[name] for name in names])


@dataclass
class Placement:
    """A DTensor placement that shards or replicates."""

    shards: bool

    def is_shard(self) -> bool:
        return self.shards

    def is_replicate(self) -> bool:
        return not self.shards

    def is_partial(self) -> bool:
        return False


def _dtensor(mesh: Mesh, shards: Sequence[str]) -> Any:
    placements = tuple(Placement(name in shards) for name in mesh.mesh_dim_names)
    return SimpleNamespace(device_mesh=mesh, placements=placements, to_local=None, shape=(1,))


SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(
    lambda sizes: dict(zip(AXES, sizes, strict=False))
)
# The roles of a mesh's axes: dense parameters are summed over "replicate" and "group", experts over "group".
ROLES = st.tuples(*[st.sampled_from(["replicate", "group", "shard", "other"])] * 3)
SOME_AXES = st.sets(st.sampled_from(AXES), min_size=1).map(frozenset)


@dataclass
class Param:
    """A parameter: "dense" or "expert" (see `Axes.groups`), and plain or sharded along axes."""

    name: str
    is_dtensor: bool
    shards: frozenset[str]


PARAMS = st.lists(
    st.builds(Param, st.sampled_from(["dense", "expert"]), st.booleans(), SOME_AXES), min_size=1, max_size=3
)


@settings(max_examples=100, deadline=None)
@given(SHAPES, ROLES, PARAMS)
def test_every_element_counts_once_over_any_mesh_and_any_groups(shape, roles, params):
    of_role = {
        role: tuple(name for name, its in zip(shape, roles, strict=False) if its == role) for role in roles
    }
    group = of_role.get("group", ())
    names = [*of_role.get("replicate", ()), *group]
    assume(names)
    axes = Axes(tuple(names), of_role.get("shard", ()), groups={"expert*": group})
    counted, elements = [], []
    for place in _ranks(shape):
        named, mine = [], []
        for index, param in enumerate(params):
            summed = group if param.name == "expert" else tuple(names)
            shards = [name for name in shape if name in param.shards and name not in summed]
            is_dtensor = param.is_dtensor and len(summed) < len(shape)
            others = [name for name in shape if name not in summed]
            held = _dtensor(_mesh(shape, place, others), shards) if is_dtensor else torch.zeros(1)
            named.append((f"{param.name}{index}", held))
            # Ranks along these axes hold different elements; ranks along all other axes hold the same ones.
            apart = {*axes.shard, *(shards if is_dtensor else ()), *(set(names) - set(summed))}
            mine.append((index, *(place[name] for name in shape if name in apart)))
        found = _counted(shape, place, named, axes)
        counted.append([True] * len(named) if found is None else found)
        elements.append(mine)
    all_ = sorted({element for mine in elements for element in mine})
    if found is None:  # ranks exchange nothing
        assert all(sorted(mine) == all_ for mine in elements)
        return
    assert _counted_elements(elements, counted) == all_


def _counted_elements(elements: Sequence[Sequence[Any]], counted: Sequence[Sequence[bool]]) -> list[Any]:
    """Return the elements that ranks count, sorted; an element that is counted twice appears twice."""
    pairs = [
        pair for mine, said in zip(elements, counted, strict=True) for pair in zip(mine, said, strict=True)
    ]
    return sorted(element for element, is_mine in pairs if is_mine)


def _counted(shape: Mapping[str, int], place: Place, named: Any, axes: Axes) -> Sequence[bool] | None:
    """Return which parameters the rank at a place counts, according to its engine."""
    mesh = _mesh(shape, place, [*shape])
    ranks = object.__new__(EngineRanks)
    ranks._mesh, ranks.problems = MeshRanks(mesh), []
    ranks._ranks = ranks._mesh.all_ranks()
    (rank,) = ranks._mesh.along([])
    ranks.membership = Membership.plain(rank=rank, world_size=len(ranks._ranks))
    with mock.patch("torch.distributed.get_rank", lambda: rank):
        ranks._join(named, axes)
    assert not ranks.problems
    return ranks.membership.counted


@dataclass(eq=False)
class Unit:
    """The attributes that `ShardedRanks` reads from a sharded module."""

    params: Sequence[Any]
    data_ndim: int
    name: str = ""


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(1, 3), st.lists(st.tuples(st.booleans(), SOME_AXES), min_size=1, max_size=3))
def test_every_element_of_a_sharded_model_counts_once(shape, data_ndim, params):
    data = [*shape][:data_ndim]
    assume(math.prod(shape.values()) > 1)
    counted, elements = [], []
    for rank, place in enumerate(_ranks(shape)):
        held, mine = [], []
        for index, (is_cut, shards) in enumerate(params):
            names = [*shape] if is_cut else data  # sharded along all axes, or only along the data axes
            held.append(_dtensor(_mesh(shape, place, names), shards))
            mine.append((index, *(place[name] for name in names if name in shards)))
        unit = Unit(held, len(data))
        comm = SimpleNamespace(rank=rank, world_size=math.prod(shape.values()))
        ranks = ShardedRanks([unit], comm)
        assume(not ranks._problems)  # without a cut parameter, the other axes are unknown
        said = ranks.counted([unit])
        counted.append([said[id(param)] for param in held])
        elements.append(mine)
    all_ = sorted({element for mine in elements for element in mine})
    assert _counted_elements(elements, counted) == all_
