"""DDP communication hooks as wires."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyengine.comm.axes import num_ranks
from pyengine.comm.base import Comm, Work
from pyengine.comm.staged import Staged
from pyengine.wire.base import Wire
from pyengine.wire.bucket_wire import OfBucket, without_memory
from pyengine.wire.memory import BucketMemory

_log = logging.getLogger("pyengine.wire")


@dataclass(frozen=True, repr=False)
class FromHook(Wire):
    """Average buckets over ranks with a DDP communication hook, `(state, bucket) -> Future[Tensor]`.

    Any hook of `torch.distributed.algorithms.ddp_comm_hooks` works, for example PowerSGD's, or your own.

    The hook gets the same input as in DDP: float32 values to be averaged over ranks. These values are this
    rank's part of the window's gradient, divided by the count and multiplied by the number of ranks (exactly,
    if this number is a power of two). The result becomes the gradient. The bucket is an object with the
    methods of `dist.GradBucket`.

    Hooks run for one bucket after another, in the same order on every rank, and each hook completes before
    any other communication starts. If hooks overlapped, a hook that continues on threads of the backend, such
    as the PowerSGD hook, would mix its collectives with the collectives of another bucket. Therefore, if the
    host waits for the backend, as with gloo, the backward waits for each hook.

    If a bucket contains inf or nan on a rank, the hook gets zeros on this rank, so that the hook's state
    stays finite. The result is nan on all ranks.

    Args:
        hook: communication hook for dense buckets.
        state: first argument of the hook, as in `register_comm_hook`. The state is not part of the engine's
            state, and is not rescaled when a loss scale changes. Use a separate state for each engine.

    Raises:
        TypeError: `hook` is not callable, or the process group in `state` has a different number of ranks
            than the engine. In the second case, every rank raises the error when the engine is created.

    Cost: the hook, two passes over the bucket, and an all-reduce of one byte.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        >>> FromHook(bf16_compress_hook)
        FromHook(torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    folds_count: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True

    hook: Callable[[Any, Any], Any]
    state: Any = None

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise TypeError(
                f"hook is a {type(self.hook).__name__}: expected a DDP communication hook, which is a "
                "function of (state, bucket)"
            )

    def __repr__(self) -> str:
        name = getattr(self.hook, "__qualname__", type(self.hook).__qualname__)
        state = "" if self.state is None else f", state=a {type(self.state).__name__}"
        return f"FromHook({getattr(self.hook, '__module__', '')}.{name}{state})"

    def prepare(self, comm: Comm) -> list[str]:
        """Compare the sizes of the process groups of the hook and the engine."""
        if self.state is None and not getattr(self.hook, "__module__", "").startswith("torch."):
            return []  # the hook has its own process group or none
        number = num_ranks(getattr(self.state, "process_group", self.state))
        if number in (None, comm.world_size):
            return []
        return [
            (
                f"wire={self}: the hook averages over {number} ranks, but gradients are summed over "
                f"{comm.world_size}: pass a state that uses the engine's process group"
            )
        ]

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire of one bucket, which gives the hook the bucket's parameters."""
        return _HookedBucket(self, memory)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        raise without_memory(self)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Raise ValueError, because only the hook knows the number of bytes.

        `StepRecord.bytes_on_wire` does not include the bytes that the hook sends.
        """
        raise ValueError(
            f"wire={self}: a hook does not report the bytes that it sends for {numel} elements over "
            f"{world_size} ranks"
        )


class _HookedBucket(OfBucket[FromHook]):
    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        return Staged(self._run(flat, comm), 0, flat.device)

    def _run(self, flat: Tensor, comm: Comm) -> Iterator[Work]:
        _log.debug("sum a bucket of %d elements by %s", flat.numel(), self.wire)
        bad = (~torch.isfinite(flat)).any().to(torch.uint8).reshape(1)
        flat.masked_fill_(bad != 0, 0).mul_(comm.world_size)
        comm.all_reduce_max(bad).wait()
        found = self.wire.hook(self.wire.state, HookBucket(flat, self.memory)).wait()
        found = found if isinstance(found, Tensor) else found[0]
        if found is not flat:
            flat.copy_(found.reshape(flat.shape))
        for place in self.memory.places:  # excludes the padding, which no window overwrites
            place.of(flat).masked_fill_(bad != 0, float("nan"))
        yield from ()


class HookBucket:
    """A bucket with the methods of `dist.GradBucket`, which Python code cannot construct."""

    def __init__(self, flat: Tensor, memory: BucketMemory) -> None:
        self._flat, self._memory = flat, memory

    def index(self) -> int:
        return self._memory.number

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat

    def is_last(self) -> bool:
        return self._memory.is_last

    def gradients(self) -> list[Tensor]:
        return [place.of(self._flat) for place in self._memory.places]

    def parameters(self) -> list[Tensor]:
        return [place.param for place in self._memory.places if place.param is not None]
