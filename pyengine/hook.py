"""The DDP communication hook: one bucket over a wire, as DDP hands it out.

Used alone (`register_comm_hook`), it averages over ranks as DDP itself does. Driven by `attach`, it sums, and the window
supplies the divisor. No string annotations here: DDP inspects the hook's signature.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pyengine._ops import BucketPlan
from pyengine.comm import TorchDist
from pyengine.wire import Wire

# Brings a bucket into its wire buffer: (bucket, buffer, scale). The window's own sums come in here.
Fill = Callable[[Any, Tensor, Tensor], None]


class HookState:
    """State of `comm_hook`: the wire, the group, and one wire buffer a bucket.

    Args:
        wire: how a bucket travels.
        group: the process group DDP was built with; None is the default group.

    Example:
        >>> ddp_model.register_comm_hook(pe.HookState(wire=pe.wire.BF16()), pe.comm_hook)  # doctest: +SKIP
    """

    def __init__(self, *, wire: Wire, group: dist.ProcessGroup | None = None) -> None:
        self.wire = wire
        self.comm = TorchDist(group)
        self.mode: Mode = Average(self.comm.world_size)
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, bucket: dist.GradBucket) -> Tensor:
        """Return the wire buffer of a bucket; made anew when DDP has rebuilt its buckets."""
        flat = bucket.buffer()
        kept = self._buffers.get(bucket.index())
        if kept is None or kept.numel() != flat.numel():
            kept = torch.empty(flat.numel(), dtype=self.wire.dtype, device=flat.device)
            self._buffers[bucket.index()] = kept
        return kept


class Mode:
    """What the hook does with a bucket beyond moving it; this one does nothing."""

    def scales(self, wire: Wire) -> tuple[Tensor | None, Tensor | None]:
        """Return what to multiply in before and after the sum: 0-dim float32 tensors, None for nothing.

        `before` is for wires that fold the count, on the way to the wire.
        """
        del wire
        return None, None

    def fill(self, bucket: dist.GradBucket, flat: Tensor, scale: Tensor) -> bool:
        """Bring the bucket into `flat`, times `scale`; return False to let the hook do it."""
        del bucket, flat, scale
        return False

    def seen(self, bucket: dist.GradBucket) -> None:
        """Hear that DDP has handed out a bucket."""


class Average(Mode):
    """DDP's own meaning: the mean over ranks."""

    def __init__(self, world_size: int) -> None:
        self._inverse = torch.tensor(1.0 / world_size)

    def scales(self, wire: Wire) -> tuple[Tensor | None, Tensor | None]:
        """Divide before a narrow cast, else after the sum."""
        return (self._inverse, None) if wire.folds_count else (None, self._inverse)


class Local(Mode):
    """Nothing travels: the answer to the one backward that static_graph needs to see before it may be deferred."""


def comm_hook(state: HookState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Reduce one DDP bucket over `state.wire`.

    Args:
        state: a `HookState`.
        bucket: DDP's bucket (under torch.compile's python_reducer a `(grad, param)` tuple, reduced in place).

    Returns:
        A future of the bucket's buffer, holding the mean over ranks.
    """
    if isinstance(bucket, tuple):
        bucket = _SingleGradient(*bucket)  # type: ignore[assignment]
        future = _exchange(state, bucket)
        future.wait()
        return future
    state.mode.seen(bucket)
    if isinstance(state.mode, Local):
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done
    return _exchange(state, bucket)


def _exchange(state: HookState, bucket: Any) -> Future[torch.Tensor]:
    flat = bucket.buffer()
    if flat.layout is not torch.strided:
        raise ValueError(
            "the bucket holds a sparse gradient, which no wire here can carry: build the embedding with sparse=False"
        )
    before, after = state.mode.scales(state.wire)
    one = torch.ones((), device=flat.device)
    in_place = state.wire.dtype == flat.dtype and before is None
    moved = flat if in_place else state.buffer(bucket)
    plan = BucketPlan([0], [flat.numel()])
    if not state.mode.fill(bucket, moved, one if before is None else before) and not in_place:
        plan.pack_(moved, [flat], one if before is None else before)
    work = state.wire.all_reduce_(moved, state.comm)

    def land(_: Future[Any]) -> Tensor:
        if moved is not flat or after is not None:
            plan.unpack_([flat], moved, one if after is None else after)
        return flat

    return work.get_future().then(land)


class _SingleGradient:
    """A gradient that torch.compile's python_reducer hands over by itself, seen as a bucket."""

    def __init__(self, grad: Tensor, param: Tensor) -> None:
        self._grad, self._param = grad, param

    def buffer(self) -> Tensor:
        return self._grad.view(-1)

    def index(self) -> int:
        return id(self._param)

    def parameters(self) -> Sequence[Tensor]:
        return [self._param]
