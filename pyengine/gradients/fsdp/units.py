"""The FSDP2 units of a sharded model, and the torch setters that the engine calls on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.comm.base import ring_bytes
from pyengine.gradients.fsdp.places import replicas_and_shards, scattered_places, whole_shape
from pyengine.gradients.fsdp.private import (
    SavedSettings,
    allow_unused_units,
    compute_dtypes,
    data_ndim,
    is_unit,
    keep_grad_dtypes,
    parameters_of,
    reduce_dtype,
    reduce_unused,
    reduced_parameters,
    state_id,
    waiting_parameters,
)
from pyengine.gradients.fsdp.traffic import CountedAllGather, ReduceScatterOverWire, ShardWire
from pyengine.wire import Wire


class Unit:
    """A module on which `fully_shard` or `replicate` was called."""

    # ---- how the unit communicates in a window; `choose` in deferral.py sets this ----

    # When the gradients of the unit are reduced. "all": in the last micro-batch only; gradients are held
    # unsharded until then. "outer": reduce-scattered in every micro-batch, and all-reduced over replicas in
    # the last micro-batch. "none": in every micro-batch.
    mode = "all"
    # Whether parameters stay unsharded from the window's first forward to its last backward.
    keeps = False

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module  # The name of the model itself is empty.
        self.params = parameters_of(module)  # The sharded parameters.
        # The number of data-parallel axes, which are the first axes of the parameters' meshes.
        self.data_ndim = data_ndim(module)
        # The numbers of replicas and shards of a parameter along these axes.
        self.replicas, self.shards = replicas_and_shards(self.params, self.data_ndim)
        self._waiting: set[int] = set()  # ids of parameters with an earlier, unreduced gradient

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all parameters."""
        return any(kind.__name__ == "ReplicateModule" for kind in type(self.module).__mro__)

    @property
    def is_sharded(self) -> bool:
        """Whether a forward has to unshard parameters."""
        return bool(self.params) and not self.is_replicated

    @property
    def has_replicas_of_shards(self) -> bool:
        """Whether gradients are reduced in two steps: over shards, then over the replicas of each shard."""
        return self.is_sharded and self.replicas > 1

    def narrows(self, wire: Wire) -> bool:
        """Whether the wire encodes or casts the gradients of this unit for the reduce-scatter."""
        dtype = reduce_dtype(self.module)
        is_other = dtype is not None and (dtype != wire.dtype or wire.is_encoded)
        return is_other and self.is_sharded and self.shards > 1

    def whole_numel(self, param: Parameter) -> int:
        """Return the number of elements of an unsharded parameter."""
        return math.prod(whole_shape(param, self.data_ndim))

    @property
    def gathered_bytes(self) -> int:
        """Size of the unsharded parameters, in bytes."""
        dtypes = compute_dtypes(self.module)
        return sum(self.whole_numel(p) * dtype.itemsize for p, dtype in zip(self.params, dtypes, strict=True))

    @property
    def sum_bytes(self) -> int:
        """Size of the unsharded sums, in bytes."""
        dtype = reduce_dtype(self.module)
        trained = sum(self.whole_numel(p) for p in self.params if p.requires_grad)
        return 0 if dtype is None else trained * dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that a rank keeps throughout a window because of `mode` and `keeps`."""
        return (self.sum_bytes if self.mode == "all" else 0) + (self.gathered_bytes if self.keeps else 0)

    @property
    def gathers_in_each_micro_batch(self) -> bool:
        """Whether the micro-batches between a window's first and last launch collectives of this unit."""
        placed: Sequence[Any] = self.params
        is_tensor_parallel = any(param.device_mesh.ndim > self.data_ndim for param in placed)
        return is_tensor_parallel or self.mode != "all" or (self.is_sharded and not self.keeps)

    def open(self) -> None:
        """Open a window."""
        module, mode = self.module, self.mode
        # A forward outside of windows may have unsharded the parameters, and an optimizer may have changed
        # them.
        module.reshard()
        module.set_requires_gradient_sync(mode != "all", recurse=False)
        if mode == "outer":
            module.set_requires_all_reduce(False, recurse=False)
        if self.keeps and self.is_sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

    def attach(self, wire: ShardWire, names: Mapping[int, str]) -> None:
        """Let the engine decide when this unit reduces gradients. The unit then does not divide their sums.

        Args:
            wire: the wire that reduces the unit's gradients; its transport counts the collectives.
            names: names of the parameters, by id.
        """
        module = self.module
        self._saved_settings = SavedSettings(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        reduce_unused(module)
        allow_unused_units(module)
        keep_grad_dtypes(module)
        if self.params:
            module.set_custom_all_gather(CountedAllGather(self._saved_settings.all_gather, wire))
            module.set_custom_reduce_scatter(
                ReduceScatterOverWire(
                    self._saved_settings.reduce_scatter,
                    wire,
                    lambda: reduced_parameters(module, self._waiting),
                    lambda params: scattered_places(params, names, self.data_ndim),
                )
            )
            if self.replicas > 1:

                def count(reduced: Tensor) -> None:
                    wire.comm.traffic.count(ring_bytes(reduced.nbytes, self.replicas))

                module.set_all_reduce_hook(count)
        self.disable_reduction()

    def disable_reduction(self) -> None:
        """Prevent reductions in a backward, and restore the setting for resharding after forwards."""
        self.module.set_requires_gradient_sync(False, recurse=False)
        self._saved_settings.restore_resharding()

    def enable_reduction(self) -> None:
        """Reduce all gradients in the next backward, and reshard after it."""
        self._waiting = waiting_parameters(self.module)
        self.module.set_requires_gradient_sync(True, recurse=False)
        self.module.set_reshard_after_backward(True, recurse=False)

    def close(self) -> None:
        """Prevent reductions outside of windows, and reshard gathered parameters."""
        self.disable_reduction()
        self.module.reshard()

    def release(self) -> None:
        self.module.reshard()
        self._saved_settings.restore()


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in module order; a unit that several modules share appears once."""
    found: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if is_unit(module):
            found.setdefault(state_id(module), Unit(name, module))
    return list(found.values())
