"""Detect that code outside the engine has written to gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.base import Reducer
from pyengine.gradients.slots import dense, local
from pyengine.ops.native import grad_states

_grad, _version = attrgetter("grad"), attrgetter("_version")
_MAX_NAMED = 3
REMEDY = "call sync.backward(loss) in place of loss.backward(), and delete zero_grad"


class GradVersions:
    """Identity and version of the `.grad` of parameters when `record` was called last.

    PyTorch increments a tensor's version with every write. The core writes by address, which does not change
    the version.

    Cost: about 0.1 µs a parameter, and as much for `changed`; without the core, and in a `record` that finds
    other gradients, 0.4 µs: the host reads about eight cache lines a parameter, which a micro-batch has
    evicted. Nothing is read on the device. No gradient is kept alive.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = list(params)
        self._states = grad_states(params)
        self._indices: Sequence[int] = ()
        self._versions: list[int] = []
        # The core compares addresses, which a new gradient may have in common with a freed one.
        self._refs: list[ref[Tensor]] = []
        self._freed: list[ref[Tensor]] = []
        self.record()

    def record(self) -> None:
        if self._states is not None and self._states.record(self._params) and not self._freed:
            return
        self._indices, grads = self._grads()
        self._versions = list(map(_version, grads))
        self._freed = []
        self._refs = [ref(grad, self._freed.append) for grad in grads]

    @property
    def sees_memory(self) -> bool:
        """Whether `is_unchanged` sees an assignment to `.grad.data`, which leaves the version as it was."""
        return self._states is not None and self._states.have_memory()

    def is_unchanged(self) -> bool:
        """Return whether the core finds nothing replaced or written to; False without the core."""
        return self._states is not None and not self._freed and self._states.is_unchanged(self._params)

    def changed(self) -> list[int]:
        """Return the indices of gradients replaced or written to."""
        if self.is_unchanged():
            return []
        if self._states is not None:
            versions = self._states.versions()
            self._versions = [versions[index] for index in self._indices]
        indices, grads = self._grads()
        kept = [kept() for kept in self._refs]
        versions = list(map(_version, grads))
        if indices == self._indices and versions == self._versions and all(map(is_, grads, kept)):
            return []
        before = set(zip(self._indices, map(id, kept), self._versions, strict=True))
        now = set(zip(indices, map(id, grads), versions, strict=True))
        return sorted({index for index, *_ in before ^ now})

    def _grads(self) -> tuple[Sequence[int], list[Tensor]]:
        """Return the indices of parameters with a gradient, and the gradients."""
        grads = list(map(_grad, self._params))
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(grads):
            return range(len(grads)), present
        return [index for index, grad in enumerate(grads) if grad is not None], present


class GradMarks:
    """Compares the gradients with those that the engine has recorded last.

    Cost: a `record` of `GradVersions`, and a call of its `changed`.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._names, self._params = reducer.names, reducer.params
        self._reducer = reducer
        self._handles: list[Any] = []
        # Ends the hooks of a window, also those that an interrupt has kept out of `_handles`.
        self._found: list[str] = []
        self._then = GradVersions(self._params)
        self.record()

    def record(self) -> None:
        self._then.record()
        self._reducer.clear_written_outside_grad()
        self._main_grads = self._reducer.main_grad_versions()

    def changed(self) -> list[int]:
        """Return the indices of parameters whose gradient has changed since `record`."""
        written, outside = self.written(), self._reducer.written_outside_grad()
        then, now = self._main_grads, self._reducer.main_grad_versions()
        if now != then:
            outside = [*outside, *(index for index in now if now[index] != then.get(index, now[index]))]
        return sorted({*written, *outside}) if outside else written

    def watch_hooks(self, refuse: Callable[[str, Tensor], object]) -> None:
        """Call the method `refuse`, once a window, for a hook that removes a gradient, or writes to its
        parameter, inside a backward.

        Cost: 0.1 µs a parameter; two hooks for each parameter that already has a post-accumulate hook.
        """
        self.release()
        # Python's garbage collector does not see hooks of a parameter: a strong reference would keep the
        # engine alive.
        call = WeakMethod(refuse)
        self._found = found = []
        # Of parameters, when their gradient is about to be accumulated; of sharded ones, whose hooks FSDP2
        # calls behind its reduction, when the window begins.
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
                what += "again, which are this rank's alone now"
            else:
                return
            found.append(name)
            own(
                f"a hook of register_post_accumulate_grad_hook has {what}, and call sync.step(optimizer), "
                "since gradients are reduced at the window's end",
                param,
            )

        for name, param in zip(self._names, self._params, strict=True):
            # torch lists hooks nowhere else, and takes none for a parameter that has been frozen since.
            if param._post_accumulate_grad_hooks and param.requires_grad:  # noqa: SLF001
                # Hooks of a tensor run before its gradient is accumulated, and those behind that in the order
                # of registration: `look` comes last.
                versions[name] = param._version
                self._handles.append(param.register_hook(partial(note, name, param)))
                self._handles.append(param.register_post_accumulate_grad_hook(partial(look, name)))

    def release(self) -> None:
        self._found.append("")
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def written(self) -> list[int]:
        """Return the indices of parameters whose `.grad` has changed since `record`."""
        return self._then.changed()

    def any_nonzero(self, indices: Sequence[int]) -> Tensor | None:
        """Return whether any of these gradients is not zero, bool 0-dim; None where there is no gradient."""
        grads = [grad for grad in (self._params[index].grad for index in indices) if grad is not None]
        return torch.stack([dense(local(grad)).any() for grad in grads]).any() if grads else None

    def describe(self, indices: Sequence[int], when: str) -> str:
        """Return a message about gradients changed at the time `when`, with the remedy."""
        more = f" and {len(indices) - _MAX_NAMED} more" if len(indices) > _MAX_NAMED else ""
        names = ", ".join(repr(self._names[index]) for index in indices[:_MAX_NAMED])
        outside = self._reducer.written_outside_grad()
        gone = all(self._params[index].grad is None and index not in outside for index in indices)
        remedy = "delete zero_grad" if gone else REMEDY
        found = "removed" if gone else "written to"
        return (
            f"{remedy}: the gradient of {names}{more} was {found} {when}, by neither sync.backward nor a "
            "micro_batch (a bare loss.backward(), zero_grad, a write to .grad). "
            "Put several backwards into `with sync.micro_batch():`. Every window starts from zero gradients. "
            "With Accelerate call accelerator.backward, with Lightning self.manual_backward"
        )
