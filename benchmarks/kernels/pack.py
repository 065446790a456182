"""Cases that compare `pack_` and `unpack_` with torch expressions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.case import Build, Case, Run, Sizes, Slots, check

Tensors = list[Tensor] | tuple[Tensor, ...]
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def _scale_cast(dst: Tensors, src: Tensors, value: float) -> None:
    """Scale and cast as torch does."""
    torch._foreach_copy_(dst, src if value == 1 else torch._foreach_mul(src, value))


def pack_case(name: str, slots: Slots, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, plan = slots.tensors(src), slots.plan()
    flat, want = slots.empty(dst), slots.empty(dst)
    scale, pointers, parts = slots.scalar(value), plan.pointers(tensors), want.split(slots.each)

    is_copy = src == dst and value == 1
    run: Run = (
        partial(torch.cat, tensors, out=want) if is_copy else partial(_scale_cast, parts, tensors, value)
    )
    plan.pack_(flat, pointers, scale)
    run()
    if src == F32:  # torch rounds the product of 16-bit tensors twice
        check(torch.equal(flat, want), name)
    read, written = plan.flat_numel * tensors[0].element_size(), plan.flat_numel * flat.element_size()
    ours, lists = partial(plan.pack_, flat, pointers, scale), partial(plan.pack_, flat, tensors, scale)
    return Case(name, ours, run, read, written, "copy", lists)


def unpack_case(name: str, slots: Slots, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, want, plan = slots.tensors(dst), slots.tensors(dst), slots.plan()
    flat = torch.randn(slots.numel, device=slots.device).to(src)
    scale, pointers, parts = slots.scalar(value), plan.pointers(tensors), flat.split(slots.each)

    torch_run = partial(_scale_cast, want, parts, value)
    plan.unpack_(pointers, flat, scale)
    torch_run()
    if src == F32 or value == 1:
        check(all(map(torch.equal, tensors, want)), name)
    read, written = plan.flat_numel * flat.element_size(), plan.flat_numel * tensors[0].element_size()
    run, lists = partial(plan.unpack_, pointers, flat, scale), partial(plan.unpack_, tensors, flat, scale)
    return Case(name, run, torch_run, read, written, "copy", lists)


def cases(sizes: Sizes) -> list[Build]:
    few, many, tiny = sizes.few, sizes.many, sizes.tiny
    return [
        partial(pack_case, "pack fp32 -> fp32, 8 tensors", few, F32, F32, 1.0),
        partial(pack_case, "pack fp32 -> bf16 x scale, 8 tensors", few, F32, BF16, 0.125),
        partial(pack_case, "pack fp32 -> fp16 x scale, 8 tensors", few, F32, FP16, 0.125),
        partial(pack_case, "pack fp32 -> bf16 cast, 8 tensors", few, F32, BF16, 1.0),
        partial(pack_case, "pack bf16 -> bf16, 8 tensors", few, BF16, BF16, 1.0),
        partial(pack_case, "pack fp32 -> bf16 x scale, 400 tensors", many, F32, BF16, 0.125),
        partial(pack_case, "pack fp32 -> bf16 x scale, 1000 of 1 KB", tiny, F32, BF16, 0.125),
        partial(pack_case, "pack fp32 -> fp32, 1000 of 1 KB", tiny, F32, F32, 1.0),
        partial(unpack_case, "unpack fp32 -> fp32 x scale, 8 tensors", few, F32, F32, 0.125),
        partial(unpack_case, "unpack bf16 -> fp32, 8 tensors", few, BF16, F32, 1.0),
        partial(unpack_case, "unpack bf16 -> fp32, 1000 of 1 KB", tiny, BF16, F32, 1.0),
    ]
