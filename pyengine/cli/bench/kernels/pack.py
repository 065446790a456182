"""pack_ and unpack_ against the torch expression."""

from __future__ import annotations

from functools import partial

import torch

from pyengine.cli.bench.kernels.case import Build, Case, Sizes, Slots, check

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def pack_case(name: str, slots: Slots, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, plan = slots.tensors(src), slots.plan()
    flat, want = slots.empty(dst), slots.empty(dst)
    scale, pointers, parts = slots.scalar(value), plan.pointers(tensors), want.split(slots.each)

    def torch_flatten() -> None:
        torch.cat(tensors, out=want)

    def torch_scale_cast() -> None:
        torch._foreach_copy_(parts, tensors if value == 1 else torch._foreach_mul(tensors, value))

    run = torch_flatten if src == dst and value == 1 else torch_scale_cast
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

    def torch_scale_cast() -> None:
        torch._foreach_copy_(want, parts if value == 1 else torch._foreach_mul(parts, value))

    plan.unpack_(pointers, flat, scale)
    torch_scale_cast()
    if src == F32 or value == 1:
        check(all(map(torch.equal, tensors, want)), name)
    read, written = plan.flat_numel * flat.element_size(), plan.flat_numel * tensors[0].element_size()
    run, lists = partial(plan.unpack_, pointers, flat, scale), partial(plan.unpack_, tensors, flat, scale)
    return Case(name, run, torch_scale_cast, read, written, "copy", lists)


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
