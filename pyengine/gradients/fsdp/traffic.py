"""FSDP2's collectives over the engine's wire, with traffic counters and detailed errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm import TorchDist
from pyengine.comm.base import Comm
from pyengine.comm.groups import ranks_of
from pyengine.gradients.fsdp.places import ScatteredSlice
from pyengine.ops.device import runs_ahead
from pyengine.wire import Wire
from pyengine.wire.bucket_wire import WireMemory


def _run(comm: Comm, launch: Callable[[bool], Any], what: str, *, group: Any, is_async: bool) -> Any:
    """Run a collective of FSDP2; see `Comm.run`."""
    if is_async:
        return launch(is_async)
    comm.run(launch, what, group)
    return None


def is_slow(inner: Any, group: Any, tensor: Tensor) -> bool:
    """Whether `inner` is torch's own collective over gloo, which is slower than point-to-point operations.

    gloo implements reduce-scatter as an all-reduce, which sends twice as many bytes. gloo's all-gather copies
    its input and output, and sends before it receives (see `PointToPoint`).
    """
    if runs_ahead(tensor.device) or group.size() == 1:
        return False
    backend = group._get_backend(tensor.device).name().lower()  # noqa: SLF001 - get_backend takes no device
    return backend == "gloo" and type(inner).__name__ in ("DefaultAllGather", "DefaultReduceScatter")


class CountedAllGather:
    """The all-gather of a unit's parameters, with a traffic counter.

    Args:
        inner: the unit's own all-gather, which `wire` replaces if it is torch's own all-gather over gloo.
    """

    def __init__(self, inner: Any, wire: ShardWire) -> None:
        self._inner, self._wire, self._comm = inner, wire, wire.comm
        self.allocate = inner.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        what = f"an all-gather of {output_tensor.nbytes} bytes of parameters"
        if not async_op and is_slow(self._inner, group, output_tensor):
            ranks_of(group, what)
            self._wire.over(group, output_tensor.device).all_gather(output_tensor, input_tensor).wait()
            return None
        self._comm.traffic.count(output_tensor.nbytes - input_tensor.nbytes)
        return _run(
            self._comm,
            lambda is_async: self._inner(output_tensor, input_tensor, group, is_async),
            what,
            group=group,
            is_async=async_op,
        )


class ShardWire:
    """The communication format (wire) in which the units of one engine reduce-scatter gradients.

    Args:
        wire: a wire with the units' reduce dtype or a narrower dtype.
        comm: transport that counts the traffic and names missing ranks.
    """

    def __init__(self, wire: Wire, comm: Comm) -> None:
        self.wire, self.comm = wire, comm
        # A function, set for each window. It returns the factor by which sums are multiplied before the
        # reduce-scatter, a 0-dim float32 tensor or None for 1.
        self.before: Callable[[], Tensor | None] = lambda: None
        self.memory = WireMemory()  # the residuals (rounding errors) of the units
        self._over: dict[Any, TorchDist] = {}

    def replaces(self, inner: Any, group: Any, parts: Tensor) -> bool:
        """Whether the wire sums this input instead of `inner`, the unit's own reduce-scatter."""
        if parts.dtype != self.wire.dtype or self.wire.is_encoded:
            return True
        return self.wire.can_reduce_scatter and is_slow(inner, group, parts)

    def over(self, group: Any, device: torch.device) -> TorchDist:
        """Return the transport over a group of a unit's mesh."""
        if group not in self._over:
            self._over[group] = TorchDist(group, device)
            self._over[group].join(self.comm)
        return self._over[group]

    def reduce_scatter(self, out: Tensor, parts: Tensor, group: Any, wire: Wire) -> None:
        """Reduce-scatter `parts` as in `Wire.reduce_scatter`; cast the values if the wire is narrower.

        If there is a factor but no cast, `parts` is overwritten. `wire` is the wire of the unit.
        """
        scale, wide = self.before(), parts
        if wide.dtype != self.wire.dtype:
            parts = torch.empty_like(wide, dtype=self.wire.dtype)
            parts.copy_(wide) if scale is None else torch.mul(wide, scale, out=parts)
        elif scale is not None:
            parts.mul_(scale)
        wire.reduce_scatter(out, parts, self.over(group, parts.device))


class ReduceScatterOverWire:
    """The reduce-scatter of a unit's gradients, called with the arguments of torch's own reduce-scatter.

    Args:
        inner: the unit's own reduce-scatter, which `wire` replaces if the wire is narrower or cheaper.
        reduced: returns the sharded parameters that this call reduce-scatters.
        places: returns the positions of the parameters in the input.
    """

    def __init__(
        self,
        inner: Any,
        wire: ShardWire,
        reduced: Callable[[], Sequence[Parameter]],
        places: Callable[[Sequence[Parameter]], Sequence[ScatteredSlice]],
    ) -> None:
        self._inner, self._wire, self._reduced, self._places = inner, wire, reduced, places
        self._own_wire: tuple[Wire, list[int]] | None = None  # the wire and its parameters' ids
        self.allocate = inner.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        if self._wire.replaces(self._inner, group, input_tensor):
            return self._wire.reduce_scatter(output_tensor, input_tensor, group, self._wire_of(input_tensor))
        self._wire.comm.traffic.count(input_tensor.nbytes - output_tensor.nbytes)
        return _run(
            self._wire.comm,
            # `comm.run` must not run this reduce-scatter in the background, because gloo never reports its
            # completion.
            lambda _: self._inner(output_tensor, input_tensor, group, op, async_op),
            f"a reduce-scatter of {input_tensor.nbytes} bytes",
            group=group,
            is_async=async_op,
        )

    def _wire_of(self, parts: Tensor) -> Wire:
        """Return the wire of the unit, or a new wire if the parameters have changed.

        Parameters are compared by identity and not by size, because parameters that are trained in turn may
        have equal sizes.
        """
        if not self._wire.wire.keeps_memory:
            return self._wire.wire
        params = self._reduced()
        ids = [id(param) for param in params]
        if self._own_wire is None or self._own_wire[1] != ids:
            places = self._places(params)
            assert sum(place.shards * place.padded for place in places) == parts.numel()
            wire = self._wire.memory.wire_for(self._wire.wire, places, parts.numel(), parts.device)
            self._own_wire = wire, ids
        return self._own_wire[0]
