"""Sums of an open window that FSDP2 has scattered already, as parts of a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.fsdp.deferral import Choice
from pyengine.gradients.fsdp.places import padded_numel
from pyengine.gradients.fsdp.private import partial_sum, reduce_dtype
from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.slots import Forms, Saved, as_gradient, local
from pyengine.ops.device import HOST


class _Trained(NamedTuple):
    """A parameter, its place and name in the model, and the elements of a shard as they are scattered."""

    place: int
    name: str
    param: Any
    padded: int


class Scattered:
    """The sums of units that reduce in every micro-batch: in `.grad`, or before their sum over replicas.

    In a state they are a shard, `[numel]` of what this rank holds, and whether this rank has used the
    parameter; another one may have.

    Args:
        units: of the model.
        choices: by unit, when it communicates.
        named: the model's parameters, sharded, in registration order.

    Attributes:
        problems: why they cannot be saved; empty if they can.
    """

    def __init__(
        self, units: Sequence[Unit], choices: Sequence[Choice], named: Sequence[tuple[str, Parameter]]
    ) -> None:
        place = {id(param): (index, name) for index, (name, param) in enumerate(named)}
        self._published: list[_Trained] = []
        self._partial: list[tuple[Unit, list[_Trained]]] = []
        for unit, choice in zip(units, choices, strict=True):
            trained = [
                _Trained(*place[id(param)], param, padded_numel(param, unit.data_ndim))
                for param in unit.params
                if choice.mode != "all" and param.requires_grad
            ]
            if choice.mode == "outer":
                self._partial.append((unit, trained))
            else:
                self._published += trained
        self.problems = [
            f"the sums of unit {unit.name!r}, which has one shard and replicas, lie within FSDP "
            "(defer='outer'): save and load between windows, or take defer='all', which holds as much"
            for unit, _ in self._partial
            if unit.shards == 1
        ]

    def begin(self) -> None:
        """Forget what was loaded and has not been added yet."""
        for unit, _ in self._partial:
            unit.reduce_scatter.earlier = None

    def forms(self) -> Forms:
        """Return types and shapes of the parts of a state, by parameter."""
        kinds = [(entry, entry.param.dtype) for entry in self._published]
        for unit, trained in self._partial:
            kinds += [(entry, reduce_dtype(unit.module)) for entry in trained]
        return {
            entry.name: {"shard": (dtype, (local(entry.param).numel(),)), "used": (torch.uint8, (1,))}
            for entry, dtype in kinds
        }

    def save(self, used: Sequence[bool]) -> Saved:
        """Return copies.

        Args:
            used: by parameter of the model, whether this rank has used it.
        """
        return {
            entry.name: {
                "shard": shard.clone(),
                "used": torch.tensor([used[entry.place]], dtype=torch.uint8, device=HOST),
            }
            for entry, shard in self._shards()
        }

    def load(self, saved: Saved, used: list[bool]) -> None:
        """Go on from what `save` returned: it is `.grad`, or is added to what is scattered next.

        Args:
            used: written, see `save`.
        """
        for entry in self._published:
            if entry.name in saved:
                part = local(entry.param)
                shard = saved[entry.name]["shard"].detach().to(part.device, copy=True)
                entry.param.grad = as_gradient(shard.view(part.shape), entry.param)
        for unit, trained in self._partial:
            if any(entry.name in saved for entry in trained):
                flat = torch.zeros(
                    sum(entry.padded for entry in trained),
                    dtype=reduce_dtype(unit.module),
                    device=trained[0].param.device,
                )
                for entry, shard in _cut(flat, trained):
                    shard.copy_(saved[entry.name]["shard"])
                unit.reduce_scatter.earlier = flat
        for entry in [*self._published, *(entry for _, trained in self._partial for entry in trained)]:
            used[entry.place] = entry.name in saved and bool(saved[entry.name]["used"])

    def _shards(self) -> Iterator[tuple[_Trained, Tensor]]:
        """Give this rank's shards of what was scattered in this window, `[numel]`."""
        for entry in self._published:
            if entry.param.grad is not None:
                yield entry, local(entry.param.grad).reshape(-1)
        for unit, trained in self._partial:
            flat = partial_sum(unit.module)
            flat = unit.reduce_scatter.earlier if flat is None else flat
            if flat is not None:
                yield from _cut(flat, trained)


def _cut(flat: Tensor, trained: Sequence[_Trained]) -> Iterator[tuple[_Trained, Tensor]]:
    """Cut what FSDP scatters of a unit into shards, without what pads them."""
    start = 0
    for entry in trained:
        yield entry, flat[start : start + local(entry.param).numel()]
        start += entry.padded
    assert start == flat.numel()
