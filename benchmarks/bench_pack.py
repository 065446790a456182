"""pack_ and unpack_ against the torch expression: python benchmarks/bench_pack.py [--save]."""

import torch
from _harness import Case, parse_options, report, split

from pyengine._ops import BucketPlan


def pack_case(name: str, numel: int, pieces: int, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors = split(numel, src, pieces)
    plan = BucketPlan(range(0, numel // pieces * pieces, numel // pieces), [numel // pieces] * pieces)
    flat, want = torch.empty(plan.flat_numel, dtype=dst), torch.empty(plan.flat_numel, dtype=dst)
    scale, pointers, parts = torch.tensor(value), plan.pointers(tensors), want.split(numel // pieces)

    def torch_flatten():
        torch.cat(tensors, out=want)

    def torch_scale_cast():
        torch._foreach_copy_(parts, tensors if value == 1 else torch._foreach_mul(tensors, value))

    run = torch_flatten if src == dst and value == 1 else torch_scale_cast
    plan.pack_(flat, pointers, scale)
    run()
    if src == torch.float32:  # torch rounds the product of 16-bit tensors once more
        assert torch.equal(flat, want), name
    read, written = plan.flat_numel * tensors[0].element_size(), plan.flat_numel * flat.element_size()
    return Case(name, lambda: plan.pack_(flat, pointers, scale), run, read, written, "copy")


def unpack_case(name: str, numel: int, pieces: int, src: torch.dtype, dst: torch.dtype, value: float) -> Case:
    tensors, want = split(numel, dst, pieces), split(numel, dst, pieces)
    plan = BucketPlan(range(0, numel // pieces * pieces, numel // pieces), [numel // pieces] * pieces)
    flat, scale, pointers = torch.randn(plan.flat_numel).to(src), torch.tensor(value), plan.pointers(tensors)
    parts = flat.split(numel // pieces)

    def torch_scale_cast():
        torch._foreach_copy_(want, parts if value == 1 else torch._foreach_mul(parts, value))

    plan.unpack_(pointers, flat, scale)
    torch_scale_cast()
    if src == torch.float32 or value == 1:
        assert all(map(torch.equal, tensors, want)), name
    read, written = plan.flat_numel * flat.element_size(), plan.flat_numel * tensors[0].element_size()
    return Case(name, lambda: plan.unpack_(pointers, flat, scale), torch_scale_cast, read, written, "copy")


def main() -> None:
    options = parse_options()
    large, small = options.megabytes * 2**18, 1000 * 256
    f32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    cases = [
        pack_case("pack fp32 -> fp32, 8 tensors", large, 8, f32, f32, 1.0),
        pack_case("pack fp32 -> bf16 x scale, 8 tensors", large, 8, f32, bf16, 0.125),
        pack_case("pack fp32 -> fp16 x scale, 8 tensors", large, 8, f32, fp16, 0.125),
        pack_case("pack fp32 -> bf16 cast, 8 tensors", large, 8, f32, bf16, 1.0),
        pack_case("pack bf16 -> bf16, 8 tensors", large, 8, bf16, bf16, 1.0),
        pack_case("pack fp32 -> bf16 x scale, 400 tensors", large, 400, f32, bf16, 0.125),
        pack_case("pack fp32 -> bf16 x scale, 1000 of 1 KB", small, 1000, f32, bf16, 0.125),
        pack_case("pack fp32 -> fp32, 1000 of 1 KB", small, 1000, f32, f32, 1.0),
        unpack_case("unpack fp32 -> fp32 x scale, 8 tensors", large, 8, f32, f32, 0.125),
        unpack_case("unpack bf16 -> fp32, 8 tensors", large, 8, bf16, f32, 1.0),
        unpack_case("unpack bf16 -> fp32, 1000 of 1 KB", small, 1000, bf16, f32, 1.0),
    ]
    report("pack", cases, options)


if __name__ == "__main__":
    main()
