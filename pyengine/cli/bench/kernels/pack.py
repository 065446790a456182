"""pack_ and unpack_ against the torch expression."""

from __future__ import annotations

from functools import partial

import torch

from pyengine.cli.bench.kernels.case import Build, Case, Sizes, Slots, check
from pyengine.cli.bench.kernels.cuda import launches
from pyengine.cli.bench.timing import Run

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def pack_case(name: str, slots: Slots, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, plan = slots.tensors(src), slots.plan()
    flat, want = slots.empty(dst), slots.empty(dst)
    scale, pointers, parts = slots.scalar(value), plan.pointers(tensors), want.split(slots.each)

    def torch_flatten() -> None:
        torch.cat(tensors, out=want)

    def torch_scale_cast() -> None:
        torch._foreach_copy_(parts, tensors if value == 1 else torch._foreach_mul(tensors, value))

    def per_chunk() -> None:
        for piece, part in groups:
            piece.pack_(flat, part, scale)

    groups = launches(tensors, plan)
    run = torch_flatten if src == dst and value == 1 else torch_scale_cast
    plan.pack_(flat, pointers, scale)
    run()
    if src == F32:  # torch rounds the product of 16-bit tensors once more
        check(torch.equal(flat, want), name)
    others: dict[str, Run] = {
        "raw lists": lambda: plan.pack_(flat, tensors, scale),
        "per-chunk launches": per_chunk,
    }
    read, written = plan.flat_numel * tensors[0].element_size(), plan.flat_numel * flat.element_size()
    return Case(name, lambda: plan.pack_(flat, pointers, scale), run, read, written, "copy", others)


def unpack_case(name: str, slots: Slots, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, want, plan = slots.tensors(dst), slots.tensors(dst), slots.plan()
    flat = torch.randn(slots.numel, device=slots.device).to(src)
    scale, pointers, parts = slots.scalar(value), plan.pointers(tensors), flat.split(slots.each)

    def torch_scale_cast() -> None:
        torch._foreach_copy_(want, parts if value == 1 else torch._foreach_mul(parts, value))

    def per_chunk() -> None:
        for piece, part in groups:
            piece.unpack_(part, flat, scale)

    groups = launches(tensors, plan)
    plan.unpack_(pointers, flat, scale)
    torch_scale_cast()
    if src == F32 or value == 1:
        check(all(map(torch.equal, tensors, want)), name)
    others: dict[str, Run] = {
        "raw lists": lambda: plan.unpack_(tensors, flat, scale),
        "per-chunk launches": per_chunk,
    }
    read, written = plan.flat_numel * flat.element_size(), plan.flat_numel * tensors[0].element_size()
    run = partial(plan.unpack_, pointers, flat, scale)
    return Case(name, run, torch_scale_cast, read, written, "copy", others)


def cases(sizes: Sizes) -> list[Build]:
    few, many, tiny = sizes.few, sizes.many, sizes.tiny
    builds: list[Build] = [
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
    return [*builds, *_more_cases(sizes)] if sizes.is_cuda else builds


def _more_cases(sizes: Sizes) -> list[Build]:
    huge, size, bucket = sizes.huge, sizes.huge_size, sizes.bucket
    odd = Slots(400, sizes.large // 400 // 2 * 2 - 1, sizes.device)
    return [
        partial(pack_case, f"pack fp32 -> fp32, 8 tensors, {size}", huge, F32, F32, 1.0),
        partial(pack_case, f"pack fp32 -> bf16 x scale, 8 tensors, {size}", huge, F32, BF16, 0.125),
        partial(unpack_case, f"unpack bf16 -> fp32, 8 tensors, {size}", huge, BF16, F32, 1.0),
        partial(pack_case, "pack fp32 -> bf16 x scale, one 25 MiB bucket", bucket, F32, BF16, 0.125),
        partial(pack_case, "pack fp32 -> bf16 x scale, 400 odd tensors", odd, F32, BF16, 0.125),
    ]
