"""Cases that compare `ExactSum` with addition in float32.

A deposit is compared with `torch._foreach_add_` on float32 sums, which an exact sum replaces. If *x torch* is
below 1, the reason is the cost of exactness, not a slow kernel. `align_` and `round_` have no counterpart in
a float32 sum and are compared with torch expressions that do the same work.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.case import Build, Case, Sizes, Slots, check
from pyengine.ops.exact import ExactSum
from pyengine.ops.exact_reference import BLOCK

F32, BF16 = torch.float32, torch.bfloat16
TERMS = 64


class _Operands:
    """Gradients in separate tensors, their exact sum, and their float32 sum."""

    def __init__(self, slots: Slots, dtype: torch.dtype) -> None:
        self.plan, self.slots = slots.plan(), slots
        self.total = ExactSum(self.plan, numel=slots.numel, terms=TERMS, device=torch.device(slots.device))
        # For integers up to 64, float32 sums are exact too, so that the contestants must agree.
        self.grads = [(64 * grad).clamp(-64, 64).round() for grad in slots.tensors(dtype)]
        self.pointers = self.plan.pointers(self.grads)
        self.acc = slots.empty(F32).zero_()
        self.parts = self.acc.split(slots.each)
        self.flags = slots.flags()

    def deposit(self, *, first: bool) -> None:
        self.total.deposit_(self.pointers, first=first, nonfinite=self.flags)


def deposit_case(name: str, slots: Slots, dtype: torch.dtype, first: bool) -> Case:
    b = _Operands(slots, dtype)

    def torch_run() -> None:
        if first:
            b.acc.zero_()
        torch._foreach_add_(b.parts, b.grads)

    b.deposit(first=True)
    b.deposit(first=first)
    torch_run()
    torch_run()
    got = slots.empty(F32)
    b.total.round_(got)
    check(torch.equal(got, b.acc), name)
    # Timing makes more deposits than the sum has bits for. The integers then wrap around, at the same cost.
    read = slots.numel * (b.grads[0].element_size() + (0 if first else 8))
    run = partial(b.deposit, first=first)
    lists = partial(b.total.deposit_, b.grads, first=first, nonfinite=b.flags)
    return Case(name, run, torch_run, read, slots.numel * 8, "copy" if first else "update", lists)


def align_case(name: str, slots: Slots) -> Case:
    """Move every block up by one bin; between two calls, only the bins are restored."""
    b = _Operands(slots, F32)
    b.deposit(first=True)
    low, high = b.total.bins.clone(), b.total.bins + 1
    hi, lo = b.total.hi.clone(), b.total.lo.clone()

    def run() -> None:
        b.total.bins.copy_(low)
        b.total.align_(high)

    def torch_run() -> None:
        lo.copy_(hi)
        hi.zero_()

    run()
    torch_run()
    check(torch.equal(b.total.hi, hi) and torch.equal(b.total.lo, lo), name)
    return Case(name, run, torch_run, slots.numel * 4, slots.numel * 8, "copy")


def round_case(name: str, slots: Slots, dtype: torch.dtype) -> Case:
    b = _Operands(slots, F32)
    b.deposit(first=True)
    out, width = slots.empty(dtype), b.total.width
    units = torch.exp2((b.total.bins.double() - 2) * width - 125).unsqueeze(1)
    hi, lo = b.total.hi.view(-1, BLOCK), b.total.lo.view(-1, BLOCK)

    def torch_run() -> Tensor:
        value: Tensor = (hi.double() * 2.0**width + lo) * units
        return value.to(dtype)

    b.total.round_(out)
    check(torch.equal(out, torch_run().view(-1)), name)
    return Case(name, partial(b.total.round_, out), torch_run, slots.numel * 8, out.nbytes, "copy")


def cases(sizes: Sizes) -> list[Build]:
    # Each slot begins at a multiple of 64, as exact sums require.
    large = sizes.large
    few, many, tiny = (Slots(n, numel // n // BLOCK * BLOCK, sizes.device)
                       for n, numel in ((8, large), (400, large), (1000, 1000 * 256)))  # fmt: skip
    return [
        partial(deposit_case, "first deposit of fp32, 8 tensors", few, F32, True),
        partial(deposit_case, "first deposit of bf16, 8 tensors", few, BF16, True),
        partial(deposit_case, "later deposit of fp32, 8 tensors", few, F32, False),
        partial(deposit_case, "later deposit of bf16, 8 tensors", few, BF16, False),
        partial(deposit_case, "later deposit of bf16, 400 tensors", many, BF16, False),
        partial(deposit_case, "later deposit of fp32, small: 1000 of 1 KB", tiny, F32, False),
        partial(align_case, "align, every block by one bin", few),
        partial(round_case, "round to fp32", few, F32),
        partial(round_case, "round to bf16", few, BF16),
    ]
