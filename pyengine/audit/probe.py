"""A few elements of every gradient, as micro-batches bring them and as the reduction leaves them.

A reduction is a sum, so the few elements of what it leaves are the sum over ranks and micro-batches of those
that came in, times one factor. What is not reduced, lost, or multiplied by something else shows in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyengine.audit.leaves import Leaves
from pyengine.audit.subject import Subject
from pyengine.ops import native
from pyengine.ops.device import runs_ahead
from pyengine.ops.pointers import PLAIN

NUM_SAMPLES = 8


class Probe:
    """Samples of local gradients, noted by hooks on the leaves that autograd accumulates into.

    Args:
        subjects: whose gradients are looked at.
        leaves: where they arrive.
        device: of the gradients.

    Attributes:
        sums: float32 `[subjects, NUM_SAMPLES]`, of this rank's micro-batches.
        last: the same of its last one.
        weights: by subject, what the next micro-batch's gradients are multiplied by.
        arrivals: by subject, gradients that came here.

    Cost: 96 bytes a parameter. Armed, some 3 µs a parameter and micro-batch; nothing otherwise.
    """

    def __init__(self, subjects: Sequence[Subject], leaves: Leaves, device: torch.device) -> None:
        self._subjects, self._leaves = subjects, leaves
        self.sums = torch.zeros(len(subjects), NUM_SAMPLES, device=device)
        self.last, self._lost = torch.zeros_like(self.sums), torch.zeros_like(self.sums)
        self._sum_rows, self._last_rows = self.sums.unbind(), self.last.unbind()
        self._places = [(0, 1, 0)] * len(subjects)
        core = None if runs_ahead(device) or not native.can_gather() else native.core()
        self._take = _leave if core is None else core.sample
        self._handles: list[Any] = []
        self.weights = [1.0] * len(subjects)
        self.arrivals = [0] * len(subjects)
        self._is_over = False

    @property
    def is_armed(self) -> bool:
        """Whether micro-batches are looked at."""
        return bool(self._handles)

    def arm(self, turn: int) -> None:
        """Begin a window: forget what was noted, look at other elements, and listen."""
        self._forget()
        self._places = [_places(subject.shard.numel, turn) for subject in self._subjects]
        if not self._handles:
            for index, subject in enumerate(self._subjects):
                if subject.summed is not None and subject.tensor.requires_grad:
                    self._handles += self._leaves.listen(subject, self._listener(index))

    def weights_of_next(self) -> list[float]:
        """Return the weights of the micro-batch that comes next, to be changed."""
        if self._is_over:
            self._forget()
        return self.weights

    def end(self) -> None:
        """Let the next gradient that comes begin a new window, for the one that was reduced is over."""
        self._is_over = True

    def disarm(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def all_sums(self) -> Tensor:
        """Return the sums, and what came before a gradient was set to None."""
        return self.sums + self._lost

    @torch.no_grad()
    def reduced(self) -> Tensor:
        """Return the same elements of the gradients as they are now, float64 `[subjects, NUM_SAMPLES]`.

        This rank's share of them: 0 for what lies on other ranks, and an n-th of what lies on n.
        """
        found = torch.zeros(self.sums.shape, device=self.sums.device)
        rows = found.unbind()
        for index, subject in enumerate(self._subjects):
            grad = subject.gradient()
            if subject.summed is not None and grad is not None:
                self._sample_shard(rows[index], grad, index)
        copies = torch.tensor([float(s.shard.copies) for s in self._subjects], dtype=torch.float64)
        return found.double() / copies.to(found.device).unsqueeze(1)

    def _forget(self) -> None:
        self.sums.zero_()
        self.last.zero_()
        self._lost.zero_()
        self.weights, self.arrivals = [1.0] * len(self._subjects), [0] * len(self._subjects)
        self._is_over = False

    def _listener(self, index: int) -> Callable[[Tensor, bool], None]:
        take, total = self._take, self._sum_rows[index]
        sum_at, last_at = total.data_ptr(), self._last_rows[index].data_ptr()

        def listen(grad: Tensor, is_first: bool) -> None:
            if self._is_over:
                self._forget()
            if is_first and self.arrivals[index]:
                self._lost[index] += total
                total.zero_()
            self.arrivals[index] += 1
            if not take(grad, PLAIN, *self._places[index], self.weights[index], sum_at, last_at):
                self._note(index, grad)

        return listen

    def _note(self, index: int, grad: Tensor) -> None:
        """Note what the core does not read: strided elements of any tensor."""
        total, last = self._sum_rows[index], self._last_rows[index]
        if hasattr(grad, "to_local"):  # partial sums, say: this rank's part says nothing
            total.fill_(torch.nan)
            return
        start, stride, num = self._places[index]
        part = _strided(grad.detach() if grad.requires_grad else grad, start, stride, num)
        weight = self.weights[index]
        total[:num].add_(part, alpha=weight)
        last[:num].copy_(part)
        if weight != 1.0:
            last[:num].mul_(weight)

    def _sample_shard(self, row: Tensor, grad: Tensor, index: int) -> None:
        start, stride, num = self._places[index]
        shard = self._subjects[index].shard
        first = max(0, -((start - shard.start) // stride))
        end = min(num, -((start - shard.start - grad.numel()) // stride))
        if end > first:
            at = start + first * stride - shard.start
            found = row[first:end]
            if not self._take(grad, PLAIN, at, stride, end - first, 1.0, 0, found.data_ptr()):
                found.copy_(_strided(grad, at, stride, end - first))


def _leave(*_: object) -> bool:
    """Read nothing, where there is no core: it is left to operators."""
    return False


def _places(numel: int, turn: int) -> tuple[int, int, int]:
    """Return (start, stride, number) of the elements that are looked at in a turn."""
    num = min(NUM_SAMPLES, numel)
    stride = max(1, numel // max(1, num))
    return turn * 40503 % stride, stride, num


def _strided(grad: Tensor, start: int, stride: int, num: int) -> Tensor:
    """Return every `stride`-th element from `start` on, in the order of the elements."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if not num:
        return grad.new_zeros(0)
    return grad.as_strided((num,), (stride,), grad.storage_offset() + start)
