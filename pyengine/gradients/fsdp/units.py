"""The units of a sharded model, and torch's switches on them, thrown by the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn import Parameter

from pyengine.gradients.fsdp.places import ScatteredPlace, replicas_and_shards, scattered_places
from pyengine.gradients.fsdp.private import (
    SavedSettings,
    data_ndim,
    is_unit,
    parameters_of,
    reduce_dtype,
    reduce_unused,
    reduced_parameters,
    state_id,
    waiting_parameters,
)
from pyengine.gradients.fsdp.traffic import (
    CountedAllGather,
    ReduceScatterOverWire,
    ShardWire,
    counted_all_reduce,
)
from pyengine.wire import Wire
from pyengine.wire.base import is_encoded


class Unit:
    """A module that `fully_shard` or `replicate` was called on.

    Attributes:
        name: in the model; empty for the model itself.
        module: it.
        params: that it manages, sharded.
        data_ndim: leading axes of their meshes along which ranks have data of their own.
        replicas, shards: how many ranks hold the same of a parameter, of those with data of their own, and
            into how many shards it is cut over them.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.params = parameters_of(module)
        self.data_ndim = data_ndim(module)
        self.replicas, self.shards = replicas_and_shards(self.params, self.data_ndim)
        self._waiting: set[int] = set()  # whose gradients the next backward reduces in any case

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
        return self.is_sharded and self.replicas > 1

    def narrows(self, wire: Wire) -> bool:
        """Whether sums of its gradients are to be scattered otherwise than as elements of the type they
        have.
        """
        dtype = reduce_dtype(self.module)
        is_other = dtype is not None and (dtype != wire.dtype or is_encoded(wire))
        return is_other and self.is_sharded and self.shards > 1

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

    def reduced(self) -> list[Parameter]:
        """Return the parameters that the unit scatters now, in their order."""
        return reduced_parameters(self.module, self._waiting)

    def places(self, names: Mapping[int, str], params: Sequence[Parameter]) -> list[ScatteredPlace]:
        """Return where parameters lie in what the unit scatters; it has to be sharded.

        Args:
            names: of parameters, by their id.
            params: that it scatters.
        """
        return scattered_places(params, names, self.data_ndim)

    def attach(self, wire: ShardWire, names: Mapping[int, str]) -> None:
        """Let the window decide when this unit reduces: sums and not means, of every parameter on every rank.

        Args:
            wire: how its gradients travel; its collectives count as of that transport.
            names: of parameters, by their id.
        """
        module = self.module
        self._saved_settings = SavedSettings(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        reduce_unused(module)
        if self.params:
            module.set_custom_all_gather(CountedAllGather(self._saved_settings.all_gather, wire.comm))
            places = partial(self.places, names)
            module.set_custom_reduce_scatter(
                ReduceScatterOverWire(self._saved_settings.reduce_scatter, wire, self.reduced, places)
            )
            if self.replicas > 1:
                module.set_all_reduce_hook(counted_all_reduce(wire.comm, self.replicas))
        self.disable_reduction()

    def disable_reduction(self) -> None:
        """Let nothing travel in a backward, and parameters be freed behind forwards as they were before."""
        self.module.set_requires_gradient_sync(False, recurse=False)
        self._saved_settings.restore_resharding()

    def enable_reduction(self) -> None:
        """Let the next backward reduce everything that is there, and free what was kept."""
        self._waiting = waiting_parameters(self.module)
        self.module.set_requires_gradient_sync(True, recurse=False)
        self.module.set_reshard_after_backward(True, recurse=False)

    def release(self) -> None:
        """Leave the unit as it was."""
        self.module.reshard()
        self._saved_settings.restore()


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in the order of its modules; modules that share one once."""
    found: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if is_unit(module):
            found.setdefault(state_id(module), Unit(name, module))
    return list(found.values())
