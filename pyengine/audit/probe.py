"""Samples of a few elements of every gradient, before and after the reduction.

Sampled elements of a reduced gradient must be equal to the sum of the same elements over all ranks and
micro-batches, times a common factor. The samples reveal gradients that were lost, not reduced, or multiplied
by a different factor.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pyengine.audit.inventory import Subject
from pyengine.gradients.fsdp.private import is_unit
from pyengine.ops import native
from pyengine.ops.device import runs_ahead, send

NUM_SAMPLES = 8


class Probe:
    """Samples of local gradients, recorded by hooks on the leaf tensors where autograd accumulates them.

    Attributes:
        sums: float32 `[subjects, NUM_SAMPLES]`, samples summed over this rank's micro-batches.
        last: samples of this rank's last micro-batch alone, with the same shape.

    Cost: 140 bytes per parameter. In a checked window, one hook call per parameter and micro-batch; in
    other windows, none.
    """

    def __init__(self, subjects: Sequence[Subject], leaves: Leaves, device: torch.device) -> None:
        self._subjects, self._leaves = subjects, leaves
        num = len(subjects)
        self.sums = torch.zeros(num, NUM_SAMPLES, dtype=torch.float32, device=device)
        self.last, self._lost = torch.zeros_like(self.sums), torch.zeros_like(self.sums)
        self._sum_rows, self._last_rows = self.sums.unbind(), self.last.unbind()
        # Arrays, because the native core reads and writes them by address.
        self._places = array("q", [0, 1, 0] * num)  # Start, stride and number of elements per subject.
        self._weights, self._ones = array("d", [1.0] * num), array("d", [1.0] * num)
        self._arrivals, self._zeros = array("q", [0] * num), array("q", [0] * num)
        self._is_over = array("B", [0])
        self._core = None if runs_ahead(device) or not native.can_gather() else native.core()
        self._handles: list[Any] = []

    @property
    def arrivals(self) -> Sequence[int]:
        """The number of gradients that arrived on this rank, by audited tensor."""
        return list(self._arrivals)

    @property
    def is_armed(self) -> bool:
        """Whether gradients of micro-batches are recorded."""
        return bool(self._handles)

    def arm(self, turn: int) -> None:
        """Begin a window: discard recorded samples, select new elements, and register hooks."""
        self._forget()
        for index, subject in enumerate(self._subjects):
            num = min(NUM_SAMPLES, subject.shard.numel)
            stride = max(1, subject.shard.numel // max(1, num))
            self._places[3 * index : 3 * index + 3] = array("q", [turn * 40503 % stride, stride, num])
        if not self._handles:
            for index, subject in enumerate(self._subjects):
                if subject.summed is not None and subject.tensor.requires_grad:
                    hook = self._leaves.listen(subject.tensor, partial(self._listener, index))
                    self._handles.append(hook)

    def weights_of_next(self) -> MutableSequence[float]:
        """Return the factors of the next micro-batch's gradients, by tensor; the caller may change them."""
        if self._is_over[0]:
            self._forget()
        return self._weights

    def end(self) -> None:
        """End the window after its reduction; the next gradient begins a new window."""
        self._is_over[0] = 1

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the current samples and discards later samples."""
        tensors = [(each, each.clone()) for each in (self.sums, self.last, self._lost)]
        weights, arrivals, is_over = self._weights[:], self._arrivals[:], self._is_over[:]

        def restore() -> None:
            for tensor, kept in tensors:
                tensor.copy_(kept)
            self._weights[:], self._arrivals[:], self._is_over[:] = weights, arrivals, is_over

        return restore

    def disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def all_sums(self) -> Tensor:
        """Return the sums, including gradients that arrived before `.grad` was set to None."""
        return self.sums + self._lost

    @torch.no_grad()
    def reduced(self) -> Tensor:
        """Return the sampled elements of the current gradients, float64 `[subjects, NUM_SAMPLES]`.

        The result is this rank's share: 0 for elements on other ranks, and 1/n of the value for
        elements on n ranks.
        """
        found = torch.zeros_like(self.sums)
        rows = found.unbind()
        for index, subject in enumerate(self._subjects):
            grad = subject.gradient()
            if subject.summed is not None and grad is not None:
                self._sample_shard(rows[index], grad, index)
        copies = send([s.shard.copies for s in self._subjects], torch.float64, found.device)
        return found.double() / copies.unsqueeze(1)

    def _forget(self) -> None:
        self.sums.zero_()
        self.last.zero_()
        self._lost.zero_()
        self._weights[:], self._arrivals[:] = self._ones, self._zeros
        self._is_over[0] = 0

    def _listener(self, index: int, owners: tuple[Tensor, ...]) -> Callable[[Tensor], None]:
        """Return a hook for a leaf tensor; see `MakeHook`.

        The hook of the native core does the same for gradients that the core can read.
        """
        total = self._sum_rows[index]

        def listen(grad: Tensor) -> None:
            if self._is_over[0]:
                self._forget()
            if self._arrivals[index] and owners and all(owner.grad is None for owner in owners):
                self._lost[index] += total
                total.zero_()
            self._arrivals[index] += 1
            self._note(index, grad)

        if self._core is None:
            return listen
        hook: Callable[[Tensor], None] = self._core.Listener(self._notes, index, owners, listen)
        return hook

    @cached_property
    def _notes(self) -> Any:
        """Return the native core's object for the recorded samples, which refers to them by address."""
        assert self._core is not None
        arrays = (self._is_over, self._places, self._weights, self._arrivals)
        tensors = (self.sums, self.last, self._lost)
        where = [*(item.buffer_info()[0] for item in arrays), *(item.data_ptr() for item in tensors)]
        return self._core.Notes(*where, NUM_SAMPLES)

    def _note(self, index: int, grad: Tensor) -> None:
        """Record the sampled elements of a gradient that the native core cannot read."""
        total, last = self._sum_rows[index], self._last_rows[index]
        if hasattr(grad, "to_local"):  # for example, a DTensor of partial sums has no local samples
            total.fill_(torch.nan)
            return
        start, stride, num = self._places[3 * index : 3 * index + 3]
        part = _strided(grad.detach() if grad.requires_grad else grad, start, stride, num)
        weight = self._weights[index]
        total[:num].add_(part, alpha=weight)
        last[:num].copy_(part)
        if weight != 1.0:
            last[:num].mul_(weight)

    def _sample_shard(self, row: Tensor, grad: Tensor, index: int) -> None:
        start, stride, num = self._places[3 * index : 3 * index + 3]
        shard = self._subjects[index].shard
        first = max(0, -((start - shard.start) // stride))
        end = min(num, -((start - shard.start - grad.numel()) // stride))
        if end > first:
            at = start + first * stride - shard.start
            found, num = row[first:end], end - first
            is_read = self._core is not None and self._core.sample(
                grad, at, stride, num, 1.0, 0, found.data_ptr()
            )
            if not is_read:
                found.copy_(_strided(grad, at, stride, end - first))


def _strided(grad: Tensor, start: int, stride: int, num: int) -> Tensor:
    """Return `num` elements in row-major order: every `stride`-th element from `start` on."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if not num:
        return grad.new_zeros(0)
    return grad.as_strided((num,), (stride,), grad.storage_offset() + start)


# ---- the leaf tensor that receives a gradient: the parameter, or the tensor that FSDP2 uses instead ----

# A function that creates the hook of a leaf tensor. The argument contains tensors whose `.grad`, after it was
# set to None, stays None until the next gradient has been accumulated. The tuple is empty if there are no
# such tensors.
MakeHook = Callable[[tuple[Tensor, ...]], Callable[[Tensor], None]]


class Leaves:
    """The leaf tensors of a model that FSDP2 may have sharded; `model=None` means no sharding."""

    def __init__(self, model: nn.Module | None) -> None:
        self._shown: dict[int, _Shown] = {}
        modules = [] if model is None else list(model.modules())
        for module in modules if any(map(is_unit, modules)) else []:
            for name, param in module.named_parameters(recurse=False):
                if hasattr(param, "to_local"):
                    self._shown.setdefault(id(param), _Shown(param, module, name))

    def listen(self, param: Tensor, make_hook: MakeHook) -> LeafHook:
        """Register a hook that gets the gradient of every backward, before the gradient is accumulated."""
        hook, shown = LeafHook(param, make_hook), self._shown.get(id(param))
        if shown is None:
            hook.register(param)
        elif shown.leaf is not None:
            hook.register(shown.leaf)
        else:
            shown.waiting.append(hook)
        return hook


class _Shown:
    """The leaf tensor that FSDP uses instead of a sharded parameter; the same tensor in every forward."""

    def __init__(self, param: Tensor, module: nn.Module, name: str) -> None:
        self._param, self._name = param, name
        self.leaf: Tensor | None = None  # None until the first forward
        self.waiting: list[LeafHook] = []
        # This hook runs after FSDP's own hook, which sets the leaf tensor.
        self._handle = module.register_forward_pre_hook(self._find)

    def _find(self, module: nn.Module, _: Any) -> None:
        leaf: Tensor = getattr(module, self._name)
        if leaf is self._param or not leaf.requires_grad:
            return
        self._handle.remove()
        self.leaf = leaf
        for hook in self.waiting:
            hook.register(leaf)
        self.waiting = []


class LeafHook:
    """A hook on the autograd node of a leaf tensor, registered when FSDP has set the leaf tensor."""

    def __init__(self, param: Any, make_hook: MakeHook) -> None:
        self._param, self._make_hook = param, make_hook
        self._registered: tuple[Any, Any] | None = None  # the autograd node, kept alive, and the handle
        self._is_removed = False

    def register(self, leaf: Tensor) -> None:
        if self._is_removed:
            return
        # Megatron sets `.grad` to None after every micro-batch, not only when gradients are cleared.
        owners = (leaf,) if leaf is self._param else (leaf, self._param)
        hook = self._make_hook(() if hasattr(self._param, "main_grad") else owners)

        def accumulated(grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                hook(grads[0])

        # A hook on the leaf itself would also run in torch.autograd.grad, which accumulates nothing.
        node = get_gradient_edge(leaf).node
        self._registered = node, node.register_prehook(accumulated)

    def remove(self) -> None:
        self._is_removed = True
        if self._registered is not None:
            self._registered[1].remove()
        self._registered = None
