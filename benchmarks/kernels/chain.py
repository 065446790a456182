"""A window's passes over gradients (accumulate, unscale, norm, clip) compared with a careful torch loop."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from kernels.case import Build, Case, Sizes, Slots, check

MICRO_BATCHES, MAX_NORM = 4, 1.0
# Bytes per element that the accumulating passes move: 10 A - 4 in total for A micro-batches. Scaling and
# clipping are not included.
_READ, _WRITTEN = 6 * MICRO_BATCHES - 4, 4 * MICRO_BATCHES
F32, BF16 = torch.float32, torch.bfloat16


class _Ours:
    """The engine's calls over bf16 gradients, with fp32 sums and a bf16 wire.

    The second to last pass divides and computes the norm; the last pass clips.
    """

    def __init__(self, slots: Slots, grads: list[list[Tensor]]) -> None:
        self.plan = plan = slots.plan()
        self.grads = [plan.pointers(each) for each in grads]
        self.acc, self.wire = slots.empty(F32), slots.empty(BF16)
        self.results = plan.pointers(list(self.wire.split(slots.each)))
        self.one, self.inv_count = slots.scalar(1.0), slots.scalar(2.0**-5)
        self.sumsq = torch.empty(slots.pieces, dtype=torch.float64, device=slots.device)
        self.flags = slots.flags()

    def __call__(self) -> Tensor:
        plan, one, results = self.plan, self.one, self.results
        *earlier, last = self.grads
        for index, grads in enumerate(earlier):
            plan.accumulate_(self.acc, grads, one, first=index == 0, nonfinite=self.flags)
        plan.accumulate_cast_(self.wire, self.acc, last, one, one, first=False, nonfinite=self.flags)
        plan.unscale_norm(results, results, self.inv_count, sumsq=self.sumsq, nonfinite=self.flags)
        norm = self.sumsq.cumsum(0)[-1].sqrt()
        factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0).float()
        plan.unscale_norm(results, results, factor, sumsq=self.sumsq, nonfinite=self.flags)
        return norm


class _Torch:
    """fp32 sums with `torch._foreach_add_`, a bf16 wire, `clip_grad_norm_`, and a check of its norm."""

    def __init__(self, slots: Slots, grads: list[list[Tensor]]) -> None:
        self.grads, self.inv_count = grads, slots.scalar(2.0**-5)
        self.acc, self.wire = slots.empty(F32), slots.empty(BF16)
        self.sums, results = list(self.acc.split(slots.each)), list(self.wire.split(slots.each))
        self.params = [torch.nn.Parameter(part) for part in results]
        for param, part in zip(self.params, results, strict=True):
            param.grad = part

    def __call__(self) -> Tensor:
        self.acc.zero_()
        for grads in self.grads:
            torch._foreach_add_(self.sums, grads)
        torch.mul(self.acc, self.inv_count, out=self.wire)
        norm = clip_grad_norm_(self.params, MAX_NORM)
        self.found_inf = ~torch.isfinite(norm)
        return norm


def chain_case(name: str, slots: Slots) -> Case:
    grads = [slots.tensors(BF16) for _ in range(MICRO_BATCHES)]
    ours, torchs = _Ours(slots, grads), _Torch(slots, grads)
    norm, other = float(ours()), float(torchs())
    # The wire and torch's norm in bf16 contribute an error of 2^-9 each; a wrong formula differs by far more.
    check(abs(norm - other) <= 1e-2 * norm, name)
    return Case(name, ours, torchs, _READ * slots.numel, _WRITTEN * slots.numel, "copy")


def cases(sizes: Sizes) -> list[Build]:
    few, many, tiny = sizes.few, sizes.many, sizes.tiny
    return [
        partial(chain_case, "window of 4 x bf16, 8 tensors", few),
        partial(chain_case, "window of 4 x bf16, 400 tensors", many),
        partial(chain_case, "window of 4 x bf16, 1000 of 1 KB", tiny),
    ]
