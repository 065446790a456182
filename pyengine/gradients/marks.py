"""Detection of writes to gradients by code outside the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from pyengine.gradients.arrival import post_accumulate_hooks
from pyengine.gradients.base import Reducer
from pyengine.gradients.published import Published
from pyengine.gradients.slots import dense, local

_MAX_NAMED = 3
REMEDY = "call sync.backward(loss) in place of loss.backward(), and delete zero_grad"


class GradMarks:
    """Compares the gradients with those that the engine recorded last.

    Between the reduction of a window and the next window's first micro-batch, this object compares the mean
    gradients in `.grad`. At other times it compares the gradients that the engine accumulates.
    """

    def __init__(self, reducer: Reducer, published: Published) -> None:
        self._names, self._params = reducer.names, reducer.params
        self._reducer, self._published = reducer, published
        self._handles: list[Any] = []

    def record(self) -> None:
        """Record the gradients while a window accumulates them."""
        self._reducer.grad_record.record()

    def changed(self) -> list[int]:
        """Return the indices of parameters whose gradient has changed since `record`."""
        record = self._reducer.grad_record
        written, outside = record.changed(), record.outside()
        return sorted({*written, *outside}) if outside else written

    def record_published(self) -> None:
        """Record the gradients in `.grad` while no window accumulates them."""
        self._published.record()
        self._reducer.grad_record.clear_outside()

    def watch_hooks(self, refuse: Callable[[str, Tensor], object]) -> None:
        """Call `refuse` once per window if a hook removes a gradient or writes to a parameter.

        Detects only hooks that run inside a backward.

        Cost: 0.1 µs per parameter, and two hooks for each parameter that already has a post-accumulate hook.
        """
        self.release()
        # Python's garbage collector does not see the hooks of a parameter, so a strong reference would keep
        # the engine alive.
        call = WeakMethod(refuse)
        found: list[str] = []
        # Versions of parameters just before their gradients are accumulated. For sharded parameters, these
        # are the versions at the start of the window, because FSDP2 calls their hooks after its reduction.
        versions: dict[str, int] = {}

        def note(name: str, param: Tensor, grad: Tensor) -> None:
            del grad
            versions[name] = param._version

        def look(name: str, param: Tensor) -> None:
            own = call()
            if own is None or found:
                return
            if param.grad is None:
                what = f"removed the gradient of {name!r} (it sets .grad to None, or steps an optimizer and "
                what += "clears the gradient): remove the hook"
            elif versions[name] != param._version:
                what = f"written to {name!r} (it steps an optimizer): remove the hook, load the parameters "
                what += "again (they now differ from those of other ranks)"
            else:
                return
            found.append(name)
            own(
                f"a hook registered with register_post_accumulate_grad_hook has {what}, and call "
                "sync.step(optimizer), because gradients are reduced at the window's end",
                param,
            )

        hooks = map(post_accumulate_hooks, self._params)
        for name, param, hooked in zip(self._names, self._params, hooks, strict=True):
            if hooked and param.requires_grad:  # torch does not allow hooks on frozen parameters.
                # Tensor hooks run before the gradient is accumulated. Post-accumulate hooks run in the order
                # of registration, so `look` runs last.
                versions[name] = param._version
                self._handles.append(param.register_hook(partial(note, name, param)))
                self._handles.append(param.register_post_accumulate_grad_hook(partial(look, name)))

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def any_nonzero(self, indices: Sequence[int]) -> Tensor | None:
        """Return whether any of these gradients is nonzero, as a 0-dim bool; None if there is no gradient."""
        grads = [grad for grad in (self._params[index].grad for index in indices) if grad is not None]
        return torch.stack([dense(local(grad)).any() for grad in grads]).any() if grads else None

    def describe(self, indices: Sequence[int], when: str) -> str:
        """Return an error message about gradients that changed; `when` says when they changed."""
        more = f" and {len(indices) - _MAX_NAMED} more" if len(indices) > _MAX_NAMED else ""
        names = ", ".join(repr(self._names[index]) for index in indices[:_MAX_NAMED])
        outside = self._reducer.grad_record.outside()
        gone = all(self._params[index].grad is None and index not in outside for index in indices)
        remedy = "delete zero_grad" if gone else REMEDY
        found = "removed" if gone else "written to"
        if len(indices) > 1 and not gone:
            more += " (at least one of them)"  # several gradients may share a version counter
        return (
            f"{remedy}: the gradient of {names}{more} was {found} {when}, outside of sync.backward and "
            "sync.micro_batch (by a bare loss.backward(), by zero_grad, or by a write to .grad). "
            "Put several backwards into `with sync.micro_batch():`. Every window starts from zero gradients. "
            "With Accelerate, call accelerator.backward; with Lightning, call self.manual_backward"
        )
