"""unscale_norm against GradScaler's unscale and clip's norm: python benchmarks/bench_unscale_norm.py [--save]."""

import torch
from _harness import Case, parse_options, report, split
from torch.nn.utils import get_total_norm

from pyengine._ops import BucketPlan


def case(name: str, numel: int, pieces: int, dtype: torch.dtype, write: bool) -> Case:
    """In place against torch's two steps; reading only, for a fused optimizer, against the same two steps."""
    tensors = split(numel, dtype, pieces)
    theirs = [t.clone() for t in tensors]
    each = numel // pieces
    plan = BucketPlan(range(0, each * pieces, each), [each] * pieces)
    pointers, scale = plan.pointers(tensors), torch.tensor(1.0)
    sumsq, flags = torch.empty(pieces, dtype=torch.float64), torch.zeros(pieces, dtype=torch.uint8)
    found_inf, inv_scale = torch.zeros(1), torch.ones(1)
    norm = torch.zeros(())

    def run():
        plan.unscale_norm(pointers, pointers if write else None, scale, sumsq=sumsq, nonfinite=flags)
        return sumsq.sum().sqrt()

    def torch_run():
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inv_scale)
        norm.copy_(get_total_norm(theirs))

    total = run().item()
    torch_run()
    # The norm of torch is a float32 sum over up to `each` terms in unknown order; 1e-3 only catches a wrong formula,
    # tests/ops/test_unscale_norm.py holds the bits.
    assert abs(norm.item() - total) <= (1e-3 if dtype == torch.float32 else 1e-2) * total, name
    read = plan.flat_numel * tensors[0].element_size()
    return Case(name, run, torch_run, read, read if write else 0, "update" if write else "read")


def main() -> None:
    options = parse_options()
    large, small = options.megabytes * 2**18, 1000 * 256
    cases = [
        case("unscale+check+norm fp32 in place, 8 tensors", large, 8, torch.float32, True),
        case("unscale+check+norm fp32 in place, 400 tensors", large, 400, torch.float32, True),
        case("unscale+check+norm fp32 in place, 1000 x 1 KB", small, 1000, torch.float32, True),
        case("check+norm fp32 read only, 8 tensors", large, 8, torch.float32, False),
        case("check+norm bf16 read only, 8 tensors", large, 8, torch.bfloat16, False),
        case("check+norm fp32 read only, 1000 x 1 KB", small, 1000, torch.float32, False),
    ]
    report("unscale_norm", cases, options)


if __name__ == "__main__":
    main()
