"""The units of a sharded model, and torch's switches on them, thrown by the window."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pyengine.comm.base import Comm
from pyengine.gradients.fsdp.private import Replaced, is_unit, parameters_of, shares_a_state
from pyengine.gradients.fsdp.traffic import CountedAllGather, CountedReduceScatter, counted_all_reduce


class Unit:
    """A module that `fully_shard` or `replicate` was called on.

    Attributes:
        name: in the model; empty for the model itself.
        module: it.
        params: that it manages, sharded.
        placements: of all of them on their mesh; None without parameters.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.params = parameters_of(module)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of it."""
        return any(kind.__name__ == "ReplicateModule" for kind in type(self.module).__mro__)

    @property
    def is_sharded(self) -> bool:
        """Whether forwards have to gather it."""
        return bool(self.params) and not self.is_replicated

    @property
    def has_replicas_of_shards(self) -> bool:
        """Whether it is reduced in two steps: over shards, and over their replicas."""
        return self.is_sharded and replicas_of(self.params[0]) > 1

    def open(self, mode: str, *, keeps: bool) -> None:
        """Begin a window; see `Choice`.

        Args:
            mode: which of the reductions earlier backwards launch: "all" defers all of them.
            keeps: whether parameters stay gathered.
        """
        module = self.module
        module.reshard()  # what a forward outside of windows has gathered: an optimizer may have stepped
        module.set_requires_gradient_sync(mode != "all", recurse=False)
        if mode == "outer":
            module.set_requires_all_reduce(False, recurse=False)
        if keeps and self.is_sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

    def take(self, comm: Comm) -> None:
        """Let the window decide when this unit reduces: sums and not means, of every parameter on every rank.

        Args:
            comm: whose traffic its collectives count as.
        """
        module = self.module
        self._replaced = Replaced(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True, recurse=False)
        if self.params:
            module.set_custom_all_gather(CountedAllGather(self._replaced.all_gather, comm))
            module.set_custom_reduce_scatter(CountedReduceScatter(self._replaced.reduce_scatter, comm))
            replicas = replicas_of(self.params[0])
            if replicas > 1:
                module.set_all_reduce_hook(counted_all_reduce(comm, replicas))
        self.rest()

    def rest(self) -> None:
        """Let nothing travel in a backward, and parameters be freed behind forwards as they were before."""
        self.module.set_requires_gradient_sync(False, recurse=False)
        self._replaced.put_back_resharding()

    def reduce(self) -> None:
        """Let the next backward reduce everything that is there, and free what was kept."""
        self.module.set_requires_gradient_sync(True, recurse=False)
        self.module.set_reshard_after_backward(True, recurse=False)

    def release(self) -> None:
        """Leave the unit as it was."""
        self.module.reshard()
        self._replaced.put_back()


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in the order of its modules; modules that share one once."""
    found: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if is_unit(module):
            found.setdefault(shares_a_state(module), Unit(name, module))
    return list(found.values())


def replicas_of(param: Any) -> int:
    """Return how many ranks hold the same elements of a parameter."""
    replicas = 1
    for axis, placement in enumerate(param.placements):
        replicas *= param.device_mesh.size(axis) if placement.is_replicate() else 1
    return replicas


def is_counted(param: Any) -> bool:
    """Whether this rank is the one that counts what it holds of a parameter, of those that hold the same."""
    coordinate = param.device_mesh.get_coordinate()
    return all(
        index == 0
        for index, placement in zip(coordinate, param.placements, strict=True)
        if placement.is_replicate()
    )


def is_first(param: Any) -> bool:
    """Whether this rank is the first on every axis of a parameter's mesh: one of all that it lies on."""
    return not any(param.device_mesh.get_coordinate())


def shard_of(whole: Tensor, param: Any) -> Tensor:
    """Return this rank's shard of a tensor of a parameter's shape: a view where that is contiguous."""
    coordinates = param.device_mesh.get_coordinate()
    for axis, placement in enumerate(param.placements):
        if placement.is_shard():
            chunks = whole.chunk(param.device_mesh.size(axis), placement.dim)
            at = coordinates[axis]
            whole = chunks[at] if at < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole.contiguous()
