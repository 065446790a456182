"""A transport on one device, which simulates ranks with equal values and whose collectives complete late.

Collectives run on their own stream after a sleep, and so does the engine's work on its side stream.
`overwrite` fills memory that has just been freed. A missing wait, or memory that is freed too early,
therefore causes a wrong sum. NCCL with one rank would not show this error, because it launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyengine.comm.base import Comm
from pyengine.comm.torch_dist import SideStream
from pyengine.engine.engine_ranks import Membership
from pyengine.ops.device import recorded_event


class _Late:
    """A collective that runs on its stream."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Any:
        raise AssertionError("own buckets wait for works")


class _LateSide(SideStream):
    """A side stream that sleeps first."""

    def __init__(self, device: torch.device, sleep: Callable[[], None]) -> None:
        super().__init__(device)
        self._sleep = sleep

    @contextmanager
    def run(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        with super().run(tensors):
            self._sleep()
            yield


class Delayed(Comm):
    """Collectives of this rank and simulated ranks, which have the same values.

    Args:
        device: device of the tensors.
        sleep: keeps the current stream busy for some milliseconds.
        world_size: number of ranks, including this one.
    """

    is_stream_ordered = True

    def __init__(self, device: torch.device, sleep: Callable[[], None], world_size: int = 2) -> None:
        super().__init__(rank=0, world_size=world_size)
        self._device, self._sleep = device, sleep
        self._stream, self._side = torch.Stream(device), _LateSide(device, sleep)

    def all_reduce(self, flat: Tensor) -> _Late:
        return self._launch(lambda: flat.mul_(self.world_size), flat)

    def all_reduce_max(self, flat: Tensor) -> _Late:
        return self._launch(lambda: flat.copy_(flat.clone()), flat)

    def all_gather_object(self, value: object) -> list[Any]:
        return [value, *(self._value_of(rank, value) for rank in range(1, self.world_size))]

    def _value_of(self, rank: int, value: Any) -> Any:
        """Return the value of another rank: the same value, except for the rank in it."""
        if not isinstance(value, tuple):
            return value
        plain = Membership.plain(rank=rank, world_size=self.world_size)
        return tuple(plain if isinstance(part, Membership) else part for part in value)

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Do nothing: the other ranks have the same values."""

    def side_stream(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        return self._side.run(tensors)

    def _launch(self, collective: Callable[[], object], flat: Tensor) -> _Late:
        self.traffic.count(0)
        flat.record_stream(self._stream)  # NCCL keeps the memory, too
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            self._sleep()
            collective()
            return _Late(recorded_event(self._device, enable_timing=False), self._device)


@contextmanager
def overwrite(model: nn.Module) -> Iterator[None]:
    """Fill memory that is freed in the body's backwards with nan immediately.

    The allocator gives a block that was freed on a stream to the next allocation on this stream, even if
    other streams still use the block. Here, a hook after every gradient makes this allocation.
    """

    def fill(param: nn.Parameter) -> None:
        for _ in range(4):
            torch.full_like(param, torch.nan)

    hooks = [param.register_post_accumulate_grad_hook(fill) for param in model.parameters()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
