"""FSDP2's collectives over the engine's wire, with traffic counters and named errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm import TorchDist
from pyengine.comm.base import Comm, ring_bytes
from pyengine.gradients.fsdp.places import ScatteredPlace
from pyengine.ops.device import runs_ahead
from pyengine.wire import Wire
from pyengine.wire.bucket_wire import WireMemory


def _run(comm: Comm, launch: Callable[[bool], Any], what: str, *, group: Any, is_async: bool) -> Any:
    """Run a collective of FSDP2; see `Comm.run`."""
    if is_async:
        return launch(is_async)
    comm.run(launch, what, group)
    return None


class CountedAllGather:
    """The unit's all-gather of parameters, with its traffic counted.

    Args:
        inner: the unit's own.
        comm: counts the traffic, and names the ranks that do not answer.
    """

    def __init__(self, inner: Any, comm: Comm) -> None:
        self._inner, self._comm = inner, comm
        self.allocate = inner.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._comm.traffic.count(output_tensor.nbytes - input_tensor.nbytes)
        return _run(
            self._comm,
            lambda is_async: self._inner(output_tensor, input_tensor, group, is_async),
            f"an all-gather of {output_tensor.nbytes} bytes of parameters",
            group=group,
            is_async=async_op,
        )


class ShardWire:
    """The wire over which the units of one engine reduce-scatter gradients.

    Args:
        wire: of the dtype that a unit reduces in, or narrower.
        comm: counts the traffic, and names the ranks that do not answer.

    Attributes:
        wire, comm: as given.
        memory: residuals of the units.
        before: returns the factor multiplied in on the way to the wire, float32 0-dim; None for 1. Set for
            each window.
    """

    def __init__(self, wire: Wire, comm: Comm) -> None:
        self.wire, self.comm = wire, comm
        self.before: Callable[[], Tensor | None] = _nothing
        self.memory = WireMemory()
        self._over: dict[Any, TorchDist] = {}

    def replaces(self, inner: Any, group: Any, parts: Tensor) -> bool:
        """Whether the wire sums this input, instead of the unit's own reduce-scatter.

        gloo's own reduce-scatter is an all-reduce, which sends twice as much.

        Args:
            inner: the unit's own reduce-scatter.
            group: of ranks.
            parts: the input.
        """
        if parts.dtype != self.wire.dtype or self.wire.is_encoded:
            return True
        is_slow = not runs_ahead(parts.device) and _backend(group, parts.device) == "gloo"
        return is_slow and type(inner).__name__ == "DefaultReduceScatter" and self.wire.can_reduce_scatter

    def wire_of(self, places: Sequence[ScatteredPlace], parts: Tensor) -> Wire:
        """Return the wire of one unit, with memory for its parameters' residuals."""
        assert sum(place.shards * place.padded for place in places) == parts.numel()
        return self.memory.wire_for(self.wire, places, parts.numel(), parts.device)

    def reduce_scatter(self, out: Tensor, parts: Tensor, group: Any, wire: Wire) -> None:
        """Sum over a group; see `Wire.reduce_scatter`.

        Values are cast where the wire is narrower.

        Args:
            out, parts: as for `Wire.reduce_scatter`. `parts` is overwritten where a factor is multiplied
                in without a cast.
            group: of ranks.
            wire: of the unit.
        """
        if group not in self._over:
            self._over[group] = TorchDist(group, parts.device)
            self._over[group].join(self.comm)
        scale, wide = self.before(), parts
        if wide.dtype != self.wire.dtype:
            parts = torch.empty_like(wide, dtype=self.wire.dtype)
            parts.copy_(wide) if scale is None else torch.mul(wide, scale, out=parts)
        elif scale is not None:
            parts.mul_(scale)
        wire.reduce_scatter(out, parts, self._over[group])


def _nothing() -> None:
    return None


def _backend(group: Any, device: torch.device) -> str:
    name: str = group._get_backend(device).name()  # noqa: SLF001 - `dist.get_backend` has no device
    return name.lower()


class ReduceScatterOverWire:
    """A unit's reduce-scatter of gradients; called with the arguments of torch's own.

    Args:
        inner: the unit's own.
        wire: replaces `inner` where it is narrower, or cheaper.
        reduced: returns the sharded parameters that are reduce-scattered now.
        places: returns their positions in the input.
    """

    def __init__(
        self,
        inner: Any,
        wire: ShardWire,
        reduced: Callable[[], Sequence[Parameter]],
        places: Callable[[Sequence[Parameter]], Sequence[ScatteredPlace]],
    ) -> None:
        self._inner, self._wire, self._reduced, self._places = inner, wire, reduced, places
        self._own_wire: tuple[Wire, list[int]] | None = None  # with the ids of its parameters
        self.allocate = inner.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        if self._wire.replaces(self._inner, group, input_tensor):
            return self._wire.reduce_scatter(output_tensor, input_tensor, group, self._wire_of(input_tensor))
        self._wire.comm.traffic.count(input_tensor.nbytes - output_tensor.nbytes)
        return _run(
            self._wire.comm,
            # Not through `comm.run` in the background: gloo's reduce-scatter never reports that it has
            # completed.
            lambda _: self._inner(output_tensor, input_tensor, group, op, async_op),
            f"a reduce-scatter of {input_tensor.nbytes} bytes",
            group=group,
            is_async=async_op,
        )

    def _wire_of(self, parts: Tensor) -> Wire:
        """Return the unit's wire, a new one for other parameters.

        Parameters are compared, not sizes: parameters that are trained in turn may have equal sizes.
        """
        if not self._wire.wire.keeps_memory:
            return self._wire.wire
        params = self._reduced()
        ids = [id(param) for param in params]
        if self._own_wire is None or self._own_wire[1] != ids:
            self._own_wire = self._wire.wire_of(self._places(params), parts), ids
        return self._own_wire[0]


def counted_all_reduce(comm: Comm, replicas: int) -> Callable[[Tensor], None]:
    """Return a hook that counts the traffic of the all-reduce over replicas.

    Args:
        comm: counts the traffic.
        replicas: ranks that the all-reduce sums over.
    """

    def count(reduced: Tensor) -> None:
        comm.traffic.count(ring_bytes(reduced.nbytes, replicas))

    return count
