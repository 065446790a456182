"""FSDP2's collectives, over the engine's wire, counted, and named where they fail."""

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
from pyengine.wire import Scatters, Wire
from pyengine.wire.base import is_encoded
from pyengine.wire.memory import KeepsMemory, WireMemory


def _run(comm: Comm, launch: Callable[[bool], Any], what: str, *, group: Any, is_async: bool) -> Any:
    """Run a collective of FSDP2; see `Comm.run`."""
    if is_async:
        return launch(is_async)
    comm.run(launch, what, group)
    return None


class CountedAllGather:
    """An all-gather of parameters as it was, that counts.

    Args:
        inner: the unit's own.
        comm: whose traffic it belongs to, and which names the ranks that do not answer.
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
    """How the units of one engine scatter sums of gradients: over its wire, counted.

    Args:
        wire: of the type that a unit reduces in, or narrower.
        comm: whose traffic it is, and which names the ranks that do not answer.

    Attributes:
        wire, comm: as given.
        keeps_memory: whether each unit needs a wire of its own; else all share the given one.
        memory: what the wire keeps of units.
        before: returns what is multiplied in on the way to the wire, float32 0-dim; None for nothing. Set for
            each window.
    """

    def __init__(self, wire: Wire, comm: Comm) -> None:
        self.wire, self.comm = wire, comm
        self.before: Callable[[], Tensor | None] = _nothing
        self.keeps_memory = isinstance(wire, KeepsMemory)
        self.memory = WireMemory()
        self._over: dict[Any, TorchDist] = {}

    def replaces(self, inner: Any, group: Any, parts: Tensor) -> bool:
        """Whether the wire is to sum these parts, and not the unit's own reduce-scatter, `inner`.

        gloo's own is an all-reduce, which sends twice as much.
        """
        if parts.dtype != self.wire.dtype or is_encoded(self.wire):
            return True
        is_slow = not runs_ahead(parts.device) and _backend(group, parts.device) == "gloo"
        return is_slow and type(inner).__name__ == "DefaultReduceScatter" and isinstance(self.wire, Scatters)

    def wire_of(self, places: Sequence[ScatteredPlace], parts: Tensor) -> Wire:
        """Return the wire of one unit, with a memory of its own for what is kept of its parameters."""
        assert sum(place.shards * place.padded for place in places) == parts.numel()
        return self.memory.wire_for(self.wire, places, parts.numel(), parts.device)

    def reduce_scatter(self, out: Tensor, parts: Tensor, group: Any, wire: Wire) -> None:
        """Sum over a group; see `Scatters.reduce_scatter`. Values are cast where the wire is narrower.

        Args:
            out: as there.
            parts: as there, and overwritten where something is multiplied in and nothing cast.
            group: of ranks.
            wire: of the unit.
        """
        assert isinstance(wire, Scatters)  # or it was refused
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
    """A unit's reduce-scatter of gradients; arguments of a call as for `CountedAllGather`.

    Args:
        inner: the unit's own.
        wire: over which it travels where that is narrower, or cheaper.
        reduced: returns the parameters that are scattered now, sharded.
        places: returns where those lie.
    """

    def __init__(
        self,
        inner: Any,
        wire: ShardWire,
        reduced: Callable[[], Sequence[Parameter]],
        places: Callable[[Sequence[Parameter]], Sequence[ScatteredPlace]],
    ) -> None:
        self._inner, self._wire, self._reduced, self._places = inner, wire, reduced, places
        self._own_wire: tuple[Wire, list[int]] | None = None  # and the ids of the parameters
        self.allocate = inner.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        if self._wire.replaces(self._inner, group, input_tensor):
            return self._wire.reduce_scatter(output_tensor, input_tensor, group, self._wire_of(input_tensor))
        self._wire.comm.traffic.count(input_tensor.nbytes - output_tensor.nbytes)
        return _run(
            self._wire.comm,
            # Not in the background: gloo's reduce-scatter never tells that it is over.
            lambda _: self._inner(output_tensor, input_tensor, group, op, async_op),
            f"a reduce-scatter of {input_tensor.nbytes} bytes",
            group=group,
            is_async=async_op,
        )

    def _wire_of(self, parts: Tensor) -> Wire:
        """Return the unit's wire, anew if other parameters are reduced than before: not of another size only,
        as those that are trained in turn may be of one.
        """
        if not self._wire.keeps_memory:
            return self._wire.wire
        params = self._reduced()
        ids = [id(param) for param in params]
        if self._own_wire is None or self._own_wire[1] != ids:
            self._own_wire = self._wire.wire_of(self._places(params), parts), ids
        return self._own_wire[0]


def counted_all_reduce(comm: Comm, replicas: int) -> Callable[[Tensor], None]:
    """Return a hook behind the all-reduce over replicas, that counts it.

    Args:
        comm: whose traffic it belongs to.
        replicas: ranks that it sums over.
    """

    def count(reduced: Tensor) -> None:
        comm.traffic.count(ring_bytes(reduced.nbytes, replicas))

    return count
