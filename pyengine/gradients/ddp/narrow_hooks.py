"""DDP hooks in the manner of PyTorch's own: narrow wires without a state, and around other hooks.

No string annotations here: DDP inspects a hook's signature.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pyengine.gradients.ddp.futures import Callbacks
from pyengine.gradients.ddp.hook import HookState, comm_hook
from pyengine.wire import BF16, FP16

Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]


def bf16_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Reduce one DDP bucket in bfloat16: `ddp_model.register_comm_hook(None, pe.bf16_hook)`.

    As `comm_hook` with the wire `BF16()`, without a state that keeps a bucket's memory on the wire from one
    backward to the next: it is allocated anew, as by PyTorch's `bf16_compress_hook`.

    Args:
        state: the process group; None is the default group.
        bucket: as for `comm_hook`.

    Raises:
        TypeError: `state` is a HookState, or anything else.

    Cost: as `comm_hook`.
    """
    return comm_hook(HookState(_no_state(state), wire=BF16()), bucket)


def fp16_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Reduce one DDP bucket in float16, divided by the number of ranks before the cast; else as `bf16_hook`.

    Args:
        state, bucket: as there.
    """
    return comm_hook(HookState(_no_state(state), wire=FP16()), bucket)


def bf16_wrapper(hook: Hook) -> Hook:
    """Return a hook that hands another one its buckets in bfloat16, and writes the result back into DDP's
    buffer.

    Args:
        hook: any hook over dense buckets: PowerSGD's, say. The state it is registered with stays its own.

    Cost: a narrow buffer of a bucket's size while it travels, and two casts.

    Example:
        >>> ddp_model.register_comm_hook(powersgd_state, pe.bf16_wrapper(powerSGD_hook))  # doctest: +SKIP
    """
    return _cast(hook, torch.bfloat16)


def fp16_wrapper(hook: Hook) -> Hook:
    """Return a hook that hands another one its buckets in float16, whose range ends at 65504; else as
    `bf16_wrapper`.

    Args:
        hook: as there.
    """
    return _cast(hook, torch.float16)


def _cast(hook: Hook, dtype: torch.dtype) -> Hook:
    if not callable(hook):
        raise TypeError(
            f"hook is a {type(hook).__name__}: need a DDP communication hook, a function of (state, bucket)"
        )
    callbacks = Callbacks()

    def narrow_hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        if isinstance(bucket, tuple):
            raise TypeError(
                "bucket is a (grad, param) pair of torch.compile's python_reducer, which has no buffer to "
                "exchange: make the model under torch._dynamo.config.optimize_ddp='ddp_optimizer'"
            )
        flat = bucket.buffer()
        bucket.set_buffer(flat.to(dtype))

        def widen(future: Future[Any]) -> Tensor:
            return flat.copy_(_tensor(future.value()))

        return callbacks.call_back(hook(state, bucket), widen)

    return narrow_hook


def _tensor(value: Any) -> Tensor:
    """Return what a hook's future holds: a tensor, or a list of one."""
    return value if isinstance(value, Tensor) else value[0]


def _no_state(state: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if isinstance(state, HookState):
        raise TypeError(
            "state is a HookState, which has a wire of its own: register it with pe.comm_hook, or this hook "
            "with a process group or None"
        )
    return state
