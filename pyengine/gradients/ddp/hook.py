"""DDP communication hook that averages a bucket over ranks in a given communication format (wire).

Annotations in this file are not strings, because DDP inspects the signature of the hook.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pyengine.comm import TorchDist
from pyengine.comm.base import Comm, Work
from pyengine.comm.shared_memory import problems_of_sharing, share_memory, wrong_choice
from pyengine.comm.staged import Staged
from pyengine.gradients.ddp.futures import Callbacks, StagedBuckets
from pyengine.ops.device import runs_ahead
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import DTYPE_CODES
from pyengine.ops.trace import span
from pyengine.window.divisor import Divisor
from pyengine.wire import FP32, Wire
from pyengine.wire.bucket_wire import WireMemory
from pyengine.wire.memory import BucketSlice
from pyengine.wire.named import WireLike, as_wire, wire_problems

# A function that writes the result of a reduction to the bucket's buffer, `[numel]`, and returns the buffer.
WriteBack = Callable[[], Tensor]
# The reduction of a bucket, and a function that writes the result to the bucket.
Launched = tuple[Work, WriteBack]


class WireBuffer:
    """The wire of a bucket, and a buffer in the communication dtype unless the bucket itself is sent."""

    def __init__(self, flat: Tensor, wire: Wire, params: Sequence[Tensor], comm: Comm) -> None:
        self.numel, self.wire = flat.numel(), wire
        self.params = {id(param) for param in params}
        self.plan = BucketPlan([0], [self.numel])  # the whole buffer is one slot
        self.one = torch.ones((), dtype=torch.float32, device=flat.device)
        is_copied = wire.folds_count or wire.dtype != flat.dtype
        self.sent = comm.allocate(self.numel, wire.dtype, flat.device) if is_copied else None


class HookState:
    """State of `comm_hook`: the wire, the process group, and the buffers of each bucket.

    One state can serve several models on the same group. A state can be created before a process group
    exists, and can be copied and pickled; an unpickled state uses the default group.

    Args:
        process_group: the process group of the DDP; None is the default group.
        wire: how buckets are sent: `pe.wire.FP32()`, `BF16()`, `Int8()` and so on (docs/wires.md). A dtype is
            accepted in place of a wire that only casts.
        shared_memory: if True, gradients on the CPU are reduced in shared memory between ranks of one host
            (docs/wires.md). The memory is used from the first bucket until the state and its models are
            released. All ranks must pass the same value.

    Raises:
        TypeError, ValueError: an argument is invalid: `process_group` is not a process group, `wire` is not a
            wire, or `shared_memory` is not a bool. With gradients on a device other than the CPU,
            `shared_memory=True` raises ValueError in the first backward.

    Example:
        >>> ddp_model.register_comm_hook(pe.HookState(wire=torch.bfloat16), pe.comm_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        wire: WireLike = FP32(),  # noqa: B008 - frozen
        shared_memory: bool = False,
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group={process_group!r} is a {type(process_group).__name__}: expected a "
                "torch.distributed.ProcessGroup, or None for the default group; pass a wire as wire="
            )
        self.group = process_group
        self.wire, self.shared_memory = as_wire(wire), shared_memory
        if problems := [*wire_problems(self.wire), *wrong_choice(shared_memory)]:
            raise ValueError(problems[0])
        # ---- state across buckets ----
        self.staged = StagedBuckets()
        self.callbacks = Callbacks()
        self.memory = WireMemory()
        # The wire buffers, by the id of the bucket's first parameter.
        self._wire_buffers: dict[int, WireBuffer] = {}
        self._comms: dict[torch.device, Comm] = {}

    def comm(self, device: torch.device) -> Comm:
        """Return the transport for buckets on a device."""
        if device not in self._comms:
            comm: Comm = TorchDist(self.group, device)
            if self.shared_memory:  # every rank creates the transport at the same bucket
                mine = [f"rank {dist.get_rank()}: {problem}" for problem in problems_of_sharing(comm, device)]
                if problems := [problem for each in comm.all_gather_object(mine) for problem in each]:
                    raise ValueError(problems[0])
                comm = share_memory(comm)
            self._comms[device] = comm
        return self._comms[device]

    def wire_buffer(self, bucket: dist.GradBucket, comm: Comm) -> WireBuffer:
        """Return the wire buffer of a bucket; create a new buffer if DDP has rebuilt its buckets."""
        # Buffers are found by parameter, because DDP numbers the buckets of every model from 0, and in the
        # first backward with static_graph every bucket has number 0.
        flat, params = bucket.buffer(), bucket.parameters()
        buffer = self._wire_buffers.get(id(params[0]))
        if buffer is None or buffer.numel != flat.numel():
            ends = itertools.accumulate(param.numel() for param in params)
            places = [
                BucketSlice(p, end - p.numel(), p.numel(), p) for p, end in zip(params, ends, strict=True)
            ]
            is_last = bucket.is_last()
            # The new wire takes over the residuals of the parameters from the old buckets.
            wire = self.memory.wire_for(self.wire, places, flat.numel(), flat.device, is_last=is_last)
            buffer = WireBuffer(flat, wire, params, comm)
            others = {key: old for key, old in self._wire_buffers.items() if not old.params & buffer.params}
            self._wire_buffers = others | {id(params[0]): buffer}
        return buffer

    def __copy__(self) -> "HookState":
        return HookState(self.group, wire=self.wire, shared_memory=self.shared_memory)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HookState":
        del memo  # a process group cannot be copied
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            warnings.warn(
                "HookState: a process group cannot be pickled; the state is restored with the default group",
                stacklevel=2,
            )
        return {"wire": self.wire, "shared_memory": self.shared_memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HookState.__init__(self, wire=state["wire"], shared_memory=state.get("shared_memory", False))


def comm_hook(state: HookState | dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Reduce one DDP bucket over `state.wire`.

    Args:
        state: a `HookState`. As with PyTorch's own hooks, it may also be a process group, or None for the
            default group. Without a `HookState`, a new state with the wire `FP32()` reduces each bucket.
        bucket: DDP's bucket. The python_reducer of torch.compile passes a `(grad, param)` tuple, which is
            reduced in place.

    Returns:
        A future of the bucket's buffer (`[numel]`, in the gradients' dtype), which then holds the mean over
            ranks. The buffer is DDP's own memory, in which DDP expects the result.

    Cost: an all-reduce of one element per gradient element, in the communication dtype. If this dtype differs
    from the gradients' dtype, or the wire applies the division, the cost also includes one read and one write
    per element before and after the all-reduce.
    """
    if not isinstance(state, HookState):
        state = HookState(state)
    if isinstance(bucket, tuple):
        future = _Mean(state, _as_bucket(*bucket)).start()
        future.wait()
        return future
    return _Mean(state, bucket).start()


class _Mean:
    """Computes the mean of a DDP bucket over ranks, including the passes before and after the all-reduce."""

    def __init__(self, state: HookState, bucket: Any) -> None:
        self.state, self.bucket = state, bucket
        flat: Tensor = bucket.buffer()
        # The native core multiplies by float32 scalars. PyTorch multiplies buckets of dtypes that
        # the core does not support.
        dtype = torch.float32 if flat.dtype in DTYPE_CODES else flat.dtype
        part = 1 / dist.get_world_size(state.group)
        self.divisor = Divisor(lambda: torch.full((), part, dtype=dtype, device=flat.device), state.wire)

    def start(self) -> Future[torch.Tensor]:
        """Launch the all-reduce, and return a future of DDP's buffer, which then holds the mean."""
        state, bucket = self.state, self.bucket
        flat: Tensor = bucket.buffer()
        if flat.layout is not torch.strided:
            raise ValueError(
                "the bucket holds a sparse gradient, which no wire can reduce: build the embedding with "
                "sparse=False"
            )
        comm = state.comm(flat.device)
        # The closure must not refer to the state or the transport. Otherwise a backend thread could be the
        # last to release the process group.
        roll_call, memory, param = comm.roll_call, state.memory, bucket.parameters()[0]
        keeps_residual = state.wire.keeps_residual

        def finish(result: Callable[[], object]) -> Tensor:
            with roll_call.named():
                result()  # raises the collective's error: torch also runs callbacks of failed futures
            reduced = write_back()
            if keeps_residual:
                # The optimizer does not use a bucket with inf or nan, so the residual of this bucket must not
                # be used either.
                memory.drop_of(param, ~torch.isfinite(reduced.sum()))
            return reduced

        with span("launch bucket", bucket.index()), comm.side_stream([flat]):
            work, write_back = self._launch(comm)
            if comm.is_stream_ordered and isinstance(work, Staged):
                return completed(finish(work.wait))  # the stream waits for the collective
        if runs_ahead(flat.device) and not comm.is_stream_ordered:
            # gloo's future completes before the stream has copied the result back to the device.
            return completed(finish(work.wait))
        if isinstance(work, Staged):
            return state.staged.add(bucket, work, lambda: finish(work.wait))
        future = work.get_future()
        if roll_call.watch is not None and not comm.is_stream_ordered:
            future = roll_call.watch.guard(future, state.callbacks.call_back)
        return state.callbacks.call_back(future, lambda future: finish(future.value))

    def _launch(self, comm: Comm) -> Launched:
        """Launch the collective, which may wait for other ranks without stalling the backward."""
        flat: Tensor = self.bucket.buffer()
        if flat.dtype not in DTYPE_CODES:
            return self._launch_wide(comm)
        buffer = self.state.wire_buffer(self.bucket, comm)
        wire = buffer.wire
        into, out_of = self.divisor.before_wire(), self.divisor.after_wire()
        sent = flat if buffer.sent is None else buffer.sent
        is_copied = sent is not flat
        if is_copied:
            buffer.plan.pack_(sent, [flat], buffer.one if into is None else into)

        def write_back() -> Tensor:
            if is_copied or out_of is not None:
                buffer.plan.unpack_([flat], sent, buffer.one if out_of is None else out_of)
            return flat

        return wire.all_reduce_(sent, comm), write_back

    def _launch_wide(self, comm: Comm) -> Launched:
        """Launch the all-reduce of float64 gradients, in float64 unless the wire encodes or divides first."""
        flat: Tensor = self.bucket.buffer()
        into, out_of = self.divisor.before_wire(), self.divisor.after_wire()
        if into is None and not self.state.wire.is_encoded:
            return comm.all_reduce(flat), lambda: flat if out_of is None else flat.mul_(out_of)
        buffer = self.state.wire_buffer(self.bucket, comm)
        assert buffer.sent is not None  # no wire has the dtype float64
        sent = buffer.sent.copy_(flat if into is None else flat * into)

        def write_back() -> Tensor:
            flat.copy_(sent)
            return flat if out_of is None else flat.mul_(out_of)

        return buffer.wire.all_reduce_(sent, comm), write_back


def completed(flat: Tensor) -> Future[torch.Tensor]:
    """Return a completed future of a buffer, on the current stream."""
    future: Future[Tensor] = Future(devices=[flat.device] if runs_ahead(flat.device) else [])
    future.set_result(flat)
    return future


def _as_bucket(grad: Tensor, param: Tensor) -> Any:
    """Create a bucket from a gradient that torch.compile's python_reducer passes to the hook."""
    return SimpleNamespace(
        buffer=lambda: grad.view(-1),
        index=lambda: id(param),
        is_last=lambda: True,
        parameters=lambda: [param],
    )
