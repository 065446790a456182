"""pack_ and unpack_ against the torch expression: python benchmarks/bench_pack.py [--device cuda] [--save]."""

from functools import partial

import torch
from _cuda import launches
from _harness import Build, Case, Options, Slots, parse_options, report

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def pack_case(name: str, slots: Slots, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, plan = slots.tensors(src), slots.plan()
    flat, want = slots.empty(dst), slots.empty(dst)
    scale, pointers, parts = slots.scalar(value), plan.pointers(tensors), want.split(slots.each)

    def torch_flatten():
        torch.cat(tensors, out=want)

    def torch_scale_cast():
        torch._foreach_copy_(parts, tensors if value == 1 else torch._foreach_mul(tensors, value))

    run = torch_flatten if src == dst and value == 1 else torch_scale_cast
    plan.pack_(flat, pointers, scale)
    run()
    if src == F32:  # torch rounds the product of 16-bit tensors once more
        assert torch.equal(flat, want), name
    others = {"raw lists": lambda: plan.pack_(flat, tensors, scale)}
    if slots.device == "cuda":
        groups = launches(tensors, plan)
        others["per-chunk launches"] = lambda: [piece.pack_(flat, part, scale) for piece, part in groups]
    read, written = plan.flat_numel * tensors[0].element_size(), plan.flat_numel * flat.element_size()
    return Case(name, lambda: plan.pack_(flat, pointers, scale), run, read, written, "copy", others)


def unpack_case(name: str, slots: Slots, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, want, plan = slots.tensors(dst), slots.tensors(dst), slots.plan()
    flat = torch.randn(slots.numel, device=slots.device).to(src)
    scale, pointers, parts = slots.scalar(value), plan.pointers(tensors), flat.split(slots.each)

    def torch_scale_cast():
        torch._foreach_copy_(want, parts if value == 1 else torch._foreach_mul(parts, value))

    plan.unpack_(pointers, flat, scale)
    torch_scale_cast()
    if src == F32 or value == 1:
        assert all(map(torch.equal, tensors, want)), name
    others = {"raw lists": lambda: plan.unpack_(tensors, flat, scale)}
    if slots.device == "cuda":
        groups = launches(tensors, plan)
        others["per-chunk launches"] = lambda: [piece.unpack_(part, flat, scale) for piece, part in groups]
    read, written = plan.flat_numel * flat.element_size(), plan.flat_numel * tensors[0].element_size()
    run = partial(plan.unpack_, pointers, flat, scale)
    return Case(name, run, torch_scale_cast, read, written, "copy", others)


def cases(options: Options) -> list[Build]:
    large = options.megabytes * 2**18
    few, many, tiny = options.slots(large, 8), options.slots(large, 400), options.slots(1000 * 256, 1000)
    builds = [
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
    return [*builds, *_more_cases(options)] if options.is_cuda else builds


def _more_cases(options: Options) -> list[Build]:
    large, size = options.megabytes * 2**18, f"{4 * options.megabytes} MiB"
    huge, bucket = options.slots(4 * large, 8), options.slots(25 * 2**18, 25)
    odd = Slots(400, large // 400 // 2 * 2 - 1, options.device)
    return [
        partial(pack_case, f"pack fp32 -> fp32, 8 tensors, {size}", huge, F32, F32, 1.0),
        partial(pack_case, f"pack fp32 -> bf16 x scale, 8 tensors, {size}", huge, F32, BF16, 0.125),
        partial(unpack_case, f"unpack bf16 -> fp32, 8 tensors, {size}", huge, BF16, F32, 1.0),
        partial(pack_case, "pack fp32 -> bf16 x scale, one 25 MiB bucket", bucket, F32, BF16, 0.125),
        partial(pack_case, "pack fp32 -> bf16 x scale, 400 odd tensors", odd, F32, BF16, 0.125),
    ]


if __name__ == "__main__":
    options = parse_options()
    report("pack", cases(options), options)
