"""accumulate_ and accumulate_cast_ against torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pyengine.cli.bench.kernels.case import Build, Case, Sizes, Slots, check
from pyengine.cli.bench.kernels.cuda import launches
from pyengine.cli.bench.timing import Run
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class _Operands:
    """One layout: gradients in tensors of their own, sums in a flat buffer."""

    def __init__(self, slots: Slots, dtype: torch.dtype) -> None:
        self.plan, self.slots = slots.plan(), slots
        self.grads = slots.tensors(dtype)
        self.pointers = self.plan.pointers(self.grads)
        self.acc, self.acc_torch = slots.empty(F32).zero_(), slots.empty(F32).zero_()
        self.parts = self.acc_torch.split(slots.each)
        self.flags = slots.flags()
        self.grad_bytes = self.grads[0].element_size()
        self.one, self.half = slots.scalar(1.0), slots.scalar(0.5)
        self.groups = launches(self.grads, self.plan)


def accumulate_case(name: str, slots: Slots, dtype: torch.dtype, first: bool) -> Case:
    """Powers of two keep torch's double rounding of 16-bit products out of the comparison."""
    b = _Operands(slots, dtype)

    def run(grads: TensorList | Pointers = b.pointers) -> None:
        b.plan.accumulate_(b.acc, grads, b.half, first=first, nonfinite=b.flags)

    def per_chunk() -> None:
        for piece, grads in b.groups:
            flags = b.flags[: len(piece.numels)]
            piece.accumulate_(b.acc, grads, b.half, first=first, nonfinite=flags)

    def torch_run() -> None:
        if first:
            b.acc_torch.zero_()
        torch._foreach_add_(b.parts, b.grads, alpha=0.5)

    run()
    torch_run()
    check(torch.equal(b.acc, b.acc_torch), name)
    numel = b.plan.flat_numel
    read = numel * (b.grad_bytes + (0 if first else 4))
    others: dict[str, Run] = {"raw lists": lambda: run(b.grads), "per-chunk launches": per_chunk}
    return Case(name, run, torch_run, read, numel * 4, "copy" if first else "update", others)


def cast_case(name: str, slots: Slots, dtype: torch.dtype, wire_dtype: torch.dtype) -> Case:
    b = _Operands(slots, dtype)
    wire, wire_torch = slots.empty(wire_dtype), slots.empty(wire_dtype)

    def cast(plan: BucketPlan, grads: TensorList | Pointers, flags: Tensor) -> None:
        plan.accumulate_cast_(wire, b.acc, grads, b.one, b.half, first=False, nonfinite=flags)

    def per_chunk() -> None:
        for piece, grads in b.groups:
            cast(piece, grads, b.flags[: len(piece.numels)])

    def torch_run() -> None:
        torch._foreach_add_(b.parts, b.grads)
        torch.mul(b.acc_torch, 0.5, out=wire_torch)

    cast(b.plan, b.pointers, b.flags)
    torch_run()
    check(torch.equal(wire, wire_torch), name)
    read, written = b.plan.flat_numel * (b.grad_bytes + 4), b.plan.flat_numel * wire.element_size()
    run = partial(cast, b.plan, b.pointers, b.flags)
    others: dict[str, Run] = {
        "raw lists": partial(cast, b.plan, b.grads, b.flags),
        "per-chunk launches": per_chunk,
    }
    return Case(name, run, torch_run, read, written, "copy", others)


def cases(sizes: Sizes) -> list[Build]:
    few, many, tiny = sizes.few, sizes.many, sizes.tiny
    builds: list[Build] = [
        partial(accumulate_case, "acc += s*bf16, 8 tensors", few, BF16, False),
        partial(accumulate_case, "acc = s*bf16 (first), 8 tensors", few, BF16, True),
        partial(cast_case, "bf16 wire = (acc + bf16) * s, 8 tensors", few, BF16, BF16),
        partial(cast_case, "fp32 wire = (acc + bf16) * s, 8 tensors", few, BF16, F32),
        partial(accumulate_case, "acc += s*bf16, 400 tensors", many, BF16, False),
        partial(accumulate_case, "acc += s*bf16, 1000 of 512 B", tiny, BF16, False),
        partial(cast_case, "bf16 wire = (acc + bf16) * s, 1000 of 512 B", tiny, BF16, BF16),
        partial(accumulate_case, "acc += s*fp32, 8 tensors", few, F32, False),
    ]
    return [*builds, *_more_cases(sizes)] if sizes.is_cuda else builds


def _more_cases(sizes: Sizes) -> list[Build]:
    huge, size, bucket = sizes.huge, sizes.huge_size, sizes.bucket
    few, tiny = sizes.few, sizes.tiny
    return [
        partial(accumulate_case, f"acc += s*bf16, 8 tensors, {size}", huge, BF16, False),
        partial(accumulate_case, f"acc = s*bf16 (first), 8 tensors, {size}", huge, BF16, True),
        partial(cast_case, f"bf16 wire = (acc + bf16) * s, 8 tensors, {size}", huge, BF16, BF16),
        partial(cast_case, "fp16 wire = (acc + fp16) * s, 8 tensors", few, FP16, FP16),
        partial(accumulate_case, "acc += s*bf16, one 25 MiB bucket", bucket, BF16, False),
        partial(accumulate_case, "acc += s*fp32, 1000 of 1 KB", tiny, F32, False),
    ]
