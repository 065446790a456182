"""Cases that compare `unscale_norm` with GradScaler's unscaling and the norm of gradient clipping."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from kernels.case import Build, Case, Run, Sizes, Slots, check
from pyengine.ops.pointers import Pointers, TensorList

F32, BF16 = torch.float32, torch.bfloat16


def case(name: str, slots: Slots, dtype: torch.dtype, write: bool) -> Case:
    """Compare with torch's unscale and norm; without `write`, it only reads, for a fused optimizer."""
    tensors, plan, flags = slots.tensors(dtype), slots.plan(), slots.flags()
    pointers, scale = plan.pointers(tensors), slots.scalar(1.0)
    sumsq = torch.empty(slots.pieces, dtype=torch.float64, device=slots.device)
    theirs = [t.clone() for t in tensors]
    found_inf, inv_scale = torch.zeros(1, device=slots.device), torch.ones(1, device=slots.device)
    norm, is_cuda = slots.scalar(0.0), slots.device == "cuda"

    def run(grads: TensorList | Pointers = pointers) -> None:
        plan.unscale_norm(grads, grads if write else None, scale, sumsq=sumsq, nonfinite=flags)

    def run_total() -> Tensor:
        run()
        return sumsq.sum().sqrt()

    def torch_run() -> None:
        if is_cuda and dtype == BF16:  # GradScaler does not unscale bf16 on CUDA
            torch._foreach_mul_(theirs, 1.0)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inv_scale)
        norm.copy_(get_total_norm(theirs))

    total = run_total().item()
    torch_run()
    # torch's norm is a float32 sum of up to `each` terms in unknown order. The tolerance of 1e-3 is therefore
    # wide and only finds a wrong formula. tests/ops/test_unscale_norm.py compares the bits.
    check(abs(norm.item() - total) <= (1e-3 if dtype == F32 else 1e-2) * total, name)
    read = plan.flat_numel * tensors[0].element_size()
    ours: Run = run if is_cuda else run_total
    written, roof = (read, "update") if write else (0, "read")
    return Case(name, ours, torch_run, read, written, roof, partial(run, tensors))


def cases(sizes: Sizes) -> list[Build]:
    few, many, tiny = sizes.few, sizes.many, sizes.tiny
    return [
        partial(case, "unscale+check+norm fp32 in place, 8 tensors", few, F32, True),
        partial(case, "unscale+check+norm fp32 in place, 400 tensors", many, F32, True),
        partial(case, "unscale+check+norm fp32 in place, 1000 x 1 KB", tiny, F32, True),
        partial(case, "check+norm fp32 read only, 8 tensors", few, F32, False),
        partial(case, "check+norm bf16 read only, 8 tensors", few, BF16, False),
        partial(case, "check+norm fp32 read only, 1000 x 1 KB", tiny, F32, False),
    ]
