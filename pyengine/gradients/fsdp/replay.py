"""Replay of a forward and backward with zero gradients.

A replay makes FSDP2 reduce gradients when the caller runs no backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyengine.ops.device import runs_ahead


class Replay:
    """Keeps the inputs of the model's last forward for a replay, until the next forward.

    FSDP2 reduces gradients inside a backward, and has no public method to reduce them elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inputs: tuple[Any, Any] | None = None
        self._autocast: tuple[bool, torch.dtype] = (False, torch.float32)
        self._handle = model.register_forward_pre_hook(self._keep, prepend=True, with_kwargs=True)
        self._is_running = False

    @property
    def has_batch(self) -> bool:
        """Whether a forward has run."""
        return self._inputs is not None

    def run(self, preserve_grads: Callable[[Sequence[Tensor]], None]) -> None:
        """Run a forward and a backward; the caller replaces their gradients with zeros.

        Buffers and random generators are restored afterwards. `preserve_grads` is called before the backward,
        with the tensors from which the backward starts.
        """
        if self._inputs is None:
            raise RuntimeError(
                "flush: FSDP reduces gradients only in a backward, and no forward of the model has run on "
                "this rank yet, so there is no batch to replay: end the first window with its last backward"
            )
        args, kwargs = self._inputs
        is_on, dtype = self._autocast
        device, restore_buffers = _device_of(self._model), copy_buffers(self._model)
        self._is_running = True
        try:
            devices = [device] if runs_ahead(device) else []
            with torch.random.fork_rng(devices, device_type=device.type), torch.enable_grad():
                with torch.autocast(device.type, dtype=dtype, enabled=is_on):
                    outputs = [t for t in _tensors(self._model(*args, **kwargs)) if t.requires_grad]
                if not outputs:
                    raise RuntimeError(
                        "flush: FSDP reduces gradients only in a backward, and the model's forward has "
                        "returned no tensor that requires a gradient: end windows with their last backward"
                    )
                preserve_grads(outputs)
                torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])
        finally:
            restore_buffers()
            self._is_running = False

    def release(self) -> None:
        self._handle.remove()
        self._inputs = None

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        if torch.is_grad_enabled() and not self._is_running:
            self._inputs = _detached(args), _detached(kwargs)
            kind = _device_of(self._model).type
            self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def copy_buffers(model: nn.Module) -> Callable[[], None]:
    """Copy the model's buffers, for example running statistics; return a function that restores them."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001 - with the module that holds each
        if buffer is not None
    ]

    @torch.no_grad()
    def restore() -> None:
        for module, name, buffer, values in kept:
            buffer.copy_(values)
            module._buffers[name] = buffer  # noqa: SLF001

    return restore


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _detached(value: Any) -> Any:
    """Detach tensors from their graph, including tensors inside lists, tuples and dicts."""
    if isinstance(value, Tensor):
        detached = value.detach()  # `requires_grad_` raises an error under torch.func transforms
        return detached.requires_grad_() if value.requires_grad else detached
    if isinstance(value, dict):
        return {name: _detached(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(list(vars(value).values()))
