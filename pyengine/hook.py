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
from pyengine.host import runs_ahead
from pyengine.trace import span
from pyengine.wire import Wire, Work

# A bucket under way, and what is to be done when it has landed: returns the bucket's buffer.
Launched = tuple[Work, Callable[[Any], Tensor]]


class Lane:
    """What a bucket's way over the wire needs every time.

    Args:
        flat: the bucket's buffer.
        wire: how it travels.
    """

    def __init__(self, flat: Tensor, wire: Wire) -> None:
        self.numel = flat.numel()
        self.plan = BucketPlan([0], [self.numel])
        self.one = torch.ones((), device=flat.device)
        self._dtype = wire.dtype
        self._buffer: Tensor | None = None

    def buffer(self) -> Tensor:
        """Return the wire buffer, made at its first use."""
        if self._buffer is None:
            self._buffer = torch.empty(self.numel, dtype=self._dtype, device=self.one.device)
        return self._buffer


class Mode:
    """What the hook does with a bucket beyond moving it; this one does nothing."""

    def before(self, one: Tensor) -> Tensor:
        """Return what to multiply in on the way to a wire that folds the count: 0-dim float32, `one` for nothing."""
        return one

    def after(self, one: Tensor) -> Tensor | None:
        """Return what to multiply in after the sum over any other wire: 0-dim float32, None for nothing."""
        del one
        return None

    def launch(self, bucket: dist.GradBucket, comm: TorchDist) -> Launched | None:
        """Start to sum the bucket over all ranks by other means than the wire; None: use the wire."""
        del bucket, comm
        return None

    def fill(self, bucket: dist.GradBucket, flat: Tensor, scale: Tensor) -> bool:
        """Bring the bucket into `flat`, times `scale`; return False to let the hook do it."""
        del bucket, flat, scale
        return False

    def seen(self, bucket: dist.GradBucket) -> None:
        """Hear that DDP has handed out a bucket."""


class Average(Mode):
    """DDP's own meaning: the mean over ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def before(self, one: Tensor) -> Tensor:
        """Divide before a narrow cast."""
        return one / self._world_size

    def after(self, one: Tensor) -> Tensor | None:
        """Divide after a wide sum."""
        return one / self._world_size


class Local(Mode):
    """Nothing travels: the answer to the one backward that static_graph needs to see before it may be deferred."""


class HookState:
    """State of `comm_hook`: the wire, the group, and what it keeps for each bucket.

    Args:
        wire: how a bucket travels.
        group: the process group DDP was built with; None is the default group.

    Example:
        >>> ddp_model.register_comm_hook(pe.HookState(wire=pe.wire.BF16()), pe.comm_hook)  # doctest: +SKIP
    """

    def __init__(self, *, wire: Wire, group: dist.ProcessGroup | None = None) -> None:
        self.wire, self.group = wire, group
        self.mode: Mode = Average(dist.get_world_size(group))
        self._lanes: dict[int, Lane] = {}
        self._comms: dict[torch.device, TorchDist] = {}

    def comm(self, device: torch.device) -> TorchDist:
        """Return the transport for buckets on a device."""
        if device not in self._comms:
            self._comms[device] = TorchDist(self.group, device)
        return self._comms[device]

    def lane(self, bucket: dist.GradBucket) -> Lane:
        """Return what is kept for a bucket; made anew when DDP has rebuilt its buckets."""
        flat = bucket.buffer()
        kept = self._lanes.get(bucket.index())
        if kept is None or kept.numel != flat.numel():
            kept = self._lanes[bucket.index()] = Lane(flat, self.wire)
        return kept


def comm_hook(state: HookState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Reduce one DDP bucket over `state.wire`.

    Args:
        state: a `HookState`.
        bucket: DDP's bucket (under torch.compile's python_reducer a `(grad, param)` tuple, reduced in place).

    Returns:
        A future of the bucket's buffer, holding the mean over ranks.
    """
    if isinstance(bucket, tuple):
        bucket = _SingleGradient(*bucket)
        future = _exchange(state, bucket)
        future.wait()
        return future
    state.mode.seen(bucket)
    if isinstance(state.mode, Local):
        return _done(bucket.buffer())
    return _exchange(state, bucket)


def _exchange(state: HookState, bucket: Any) -> Future[torch.Tensor]:
    flat = bucket.buffer()
    if flat.layout is not torch.strided:
        raise ValueError(
            "the bucket holds a sparse gradient, which no wire here can carry: build the embedding with sparse=False"
        )
    comm = state.comm(flat.device)
    # Scales may come from other ranks: waiting for them must not hold up the backward.
    with span("launch bucket", bucket.index()), comm.beside([flat]):
        work, land = state.mode.launch(bucket, comm) or _launch(state, bucket, comm)
    if runs_ahead(flat.device) and not comm.is_stream_ordered:
        # gloo's future is complete before the stream that copies the result back to the device is.
        work.wait()
        return _done(land(work))
    return work.get_future().then(land)


def _launch(state: HookState, bucket: Any, comm: TorchDist) -> Launched:
    flat: Tensor = bucket.buffer()
    lane, wire, mode = state.lane(bucket), state.wire, state.mode
    before = mode.before(lane.one) if wire.folds_count else lane.one
    after = None if wire.folds_count else mode.after(lane.one)
    is_moved = wire.folds_count or wire.dtype != flat.dtype
    moved = lane.buffer() if is_moved else flat
    if not mode.fill(bucket, moved, before) and is_moved:
        lane.plan.pack_(moved, [flat], before)

    def land(_: Any) -> Tensor:
        if is_moved or after is not None:
            lane.plan.unpack_([flat], moved, lane.one if after is None else after)
        return flat

    return wire.all_reduce_(moved, comm), land


def _done(flat: Tensor) -> Future[torch.Tensor]:
    future: Future[Tensor] = Future(devices=[flat.device] if runs_ahead(flat.device) else [])
    future.set_result(flat)
    return future


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
