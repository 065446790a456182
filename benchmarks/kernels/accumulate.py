"""Cases that compare `accumulate_` and `accumulate_cast_` with torch."""

from __future__ import annotations

from functools import partial

import torch

from kernels.case import Build, Case, Sizes, Slots, check
from pyengine.ops.pointers import Pointers, TensorList

F32, BF16 = torch.float32, torch.bfloat16


class _Operands:
    """Gradients in separate tensors, and their sums in a flat buffer."""

    def __init__(self, slots: Slots, dtype: torch.dtype) -> None:
        self.plan, self.slots = slots.plan(), slots
        self.grads = slots.tensors(dtype)
        self.pointers = self.plan.pointers(self.grads)
        self.acc, self.acc_torch = slots.empty(F32).zero_(), slots.empty(F32).zero_()
        self.parts = self.acc_torch.split(slots.each)
        self.flags = slots.flags()
        self.grad_bytes = self.grads[0].element_size()
        self.one, self.half = slots.scalar(1.0), slots.scalar(0.5)


def accumulate_case(name: str, slots: Slots, dtype: torch.dtype, first: bool) -> Case:
    # The scale is a power of two, so that it does not matter that torch rounds 16-bit products twice.
    b = _Operands(slots, dtype)

    def run(grads: TensorList | Pointers = b.pointers) -> None:
        b.plan.accumulate_(b.acc, grads, b.half, first=first, nonfinite=b.flags)

    def torch_run() -> None:
        if first:
            b.acc_torch.zero_()
        torch._foreach_add_(b.parts, b.grads, alpha=0.5)

    run()
    torch_run()
    check(torch.equal(b.acc, b.acc_torch), name)
    numel = b.plan.flat_numel
    read = numel * (b.grad_bytes + (0 if first else 4))
    roof = "copy" if first else "update"
    return Case(name, run, torch_run, read, numel * 4, roof, partial(run, b.grads))


def cast_case(name: str, slots: Slots, dtype: torch.dtype, wire_dtype: torch.dtype) -> Case:
    b = _Operands(slots, dtype)
    wire, wire_torch = slots.empty(wire_dtype), slots.empty(wire_dtype)

    def run(grads: TensorList | Pointers = b.pointers) -> None:
        b.plan.accumulate_cast_(wire, b.acc, grads, b.one, b.half, first=False, nonfinite=b.flags)

    def torch_run() -> None:
        torch._foreach_add_(b.parts, b.grads)
        torch.mul(b.acc_torch, 0.5, out=wire_torch)

    run()
    torch_run()
    check(torch.equal(wire, wire_torch), name)
    read, written = b.plan.flat_numel * (b.grad_bytes + 4), b.plan.flat_numel * wire.element_size()
    return Case(name, run, torch_run, read, written, "copy", partial(run, b.grads))


def cases(sizes: Sizes) -> list[Build]:
    few, many, tiny = sizes.few, sizes.many, sizes.tiny
    return [
        partial(accumulate_case, "acc += s*bf16, 8 tensors", few, BF16, False),
        partial(accumulate_case, "acc = s*bf16 (first), 8 tensors", few, BF16, True),
        partial(cast_case, "bf16 wire = (acc + bf16) * s, 8 tensors", few, BF16, BF16),
        partial(cast_case, "fp32 wire = (acc + bf16) * s, 8 tensors", few, BF16, F32),
        partial(accumulate_case, "acc += s*bf16, 400 tensors", many, BF16, False),
        partial(accumulate_case, "acc += s*bf16, 1000 of 512 B", tiny, BF16, False),
        partial(cast_case, "bf16 wire = (acc + bf16) * s, 1000 of 512 B", tiny, BF16, BF16),
        partial(accumulate_case, "acc += s*fp32, 8 tensors", few, F32, False),
    ]
