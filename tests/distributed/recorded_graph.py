"""A CUDA graph that is simulated on the CPU: operations are recorded, and run again on the same memory.

With `stream_races.machine`, the engine works as if the host ran ahead of a device. During a capture,
operations do run, because Python uses their results; then `restore` undoes their writes, so that, as on a
device, nothing has happened before the first `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from stream_races import machine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pyengine.comm.base import Comm, Done, Local
from pyengine.comm.torch_dist import TorchDist
from pyengine.engine import captured_windows, engine_ranks
from pyengine.engine.window_graph import DeviceGraph

# Operations that cannot be captured on a device.
_READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select"}
_RANDOM_OR_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

_recording: Recorder | None = None


class Recorder(TorchDispatchMode):
    """Records operations, and the memory that they overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Callable[[], object]] = []
        self.names: list[str] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._new: set[int] = set()
        self._alive: list[Any] = []  # keeps the graph's storages, so their memory is not reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if name in _READS and not _is_on_host(args[0]):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        written = _written(func, args, kwargs)
        for tensor in written:
            self.keep(tensor)
        result = func(*args, **kwargs)
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [out for out in outs if _storage(out) not in known]
        self._new |= {_storage(out) for out in fresh}
        self._alive += [(args, kwargs, result)]
        self.names.append(name)
        if written or (fresh and name not in _RANDOM_OR_EMPTY):
            self.actions.append(lambda: _run(func, args, kwargs, outs, known))
        return result

    def keep(self, tensor: Tensor) -> None:
        """Copy memory that is about to be overwritten, unless the capture has allocated it."""
        key = _storage(tensor)
        if key not in self._new and key not in self._before:
            flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[key] = flat, flat.clone()

    def collective(self, written: Sequence[Tensor], launch: Callable[[], object]) -> None:
        """Record a collective, which does not run in the capture, because other ranks may not take part."""
        for tensor in written:
            self.keep(tensor)
        self._alive.append(launch)
        self.actions.append(launch)

    def restore(self) -> None:
        for flat, before in self._before.values():
            flat.copy_(before)


def _run(func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], known: set[int]) -> None:
    result = func(*args, **kwargs)
    for out, now in zip(outs, (x for x in tree_leaves(result) if isinstance(x, Tensor)), strict=True):
        if _storage(out) not in known and now.shape == out.shape and now is not out:
            out.copy_(now)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    written = [value for a, value in named if a.alias_info is not None and a.alias_info.is_write]
    if func.__name__.startswith("native_batch_norm."):  # its schema does not show that it writes statistics
        written += args[3:5]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor would be on the host: an element of DDP's map of used parameters."""
    return tensor.dtype == torch.int32 and tensor.dim() == 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class RecordedGraph(DeviceGraph):
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    @contextmanager
    def capture(self, stream: object) -> Iterator[None]:
        global _recording
        _recording = self.recorder
        rng = torch.get_rng_state()
        try:
            with self.recorder:
                yield
        finally:
            _recording = None
            torch.set_rng_state(rng)
            with torch.no_grad():
                self.recorder.restore()

    def replay(self) -> None:
        with torch.no_grad(), _disable_current_modes():
            for action in self.recorder.actions:
                action()

    @staticmethod
    def problems(device: torch.device) -> list[str]:
        return []


class Ordered(TorchDist):
    """Collectives over real gloo ranks that complete at launch, as if a stream waited for them."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(group, device)
        self.is_stream_ordered = True

    def with_own_group(self) -> Comm:
        return self

    def between_hosts(self) -> Comm:
        return TorchDist(dist.new_group(), torch.device("cpu"))  # separate from a graph's collectives

    def side_stream(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce(self, flat: Tensor) -> Done:
        return self._order(flat, lambda: dist.all_reduce(flat))

    def all_reduce_max(self, flat: Tensor) -> Done:
        return self._order(flat, lambda: dist.all_reduce(flat, dist.ReduceOp.MAX))

    def all_to_all(self, received: Tensor, parts: Tensor) -> Done:
        return self._order(received, lambda: dist.all_to_all_single(received, parts))

    def all_gather(self, gathered: Tensor, part: Tensor) -> Done:
        pieces = list(gathered.view(self.world_size, -1).unbind())
        return self._order(gathered, lambda: dist.all_gather(pieces, part.clone()))

    def broadcast_(self, tensors: list[Tensor]) -> None:
        self.traffic.count(sum(tensor.nbytes for tensor in tensors))
        _run_or_record(tensors, lambda: [dist.broadcast(tensor, 0) for tensor in tensors])

    def _order(self, written: Tensor, launch: Callable[[], object]) -> Done:
        self.traffic.count(written.nbytes)
        _run_or_record([written], launch)
        return Done(written)


def _run_or_record(written: Sequence[Tensor], launch: Callable[[], object]) -> None:
    with _disable_current_modes():
        if _recording is None:
            launch()
        else:
            _recording.collective(written, launch)


def _comm() -> Comm:
    return Ordered(None, torch.device("cpu")) if dist.is_initialized() else Local()


@contextmanager
def recorded_device() -> Iterator[None]:
    """Simulate a device with graphs on the CPU, for engines that are created in the body."""
    with (
        machine(finds_races=False, events_are_done=True),
        mock.patch.object(captured_windows, "DeviceGraph", RecordedGraph),
        mock.patch.object(captured_windows, "_is_on_device", lambda tensor: not _is_on_host(tensor)),
        mock.patch.object(engine_ranks, "comm_for", lambda *_: _comm()),
    ):
        yield
