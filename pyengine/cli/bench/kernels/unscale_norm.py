"""unscale_norm against GradScaler's unscale and clip's norm."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from pyengine.cli.bench.kernels.case import Build, Case, Sizes, Slots, check
from pyengine.cli.bench.kernels.cuda import launches
from pyengine.cli.bench.timing import Run
from pyengine.ops.pointers import Pointers, TensorList

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class _Operands:
    """Tensors, a plan over them and what the op writes."""

    def __init__(self, slots: Slots, dtype: torch.dtype, write: bool) -> None:
        self.tensors, self.plan, self.write = slots.tensors(dtype), slots.plan(), write
        self.pointers, self.scale = self.plan.pointers(self.tensors), slots.scalar(1.0)
        self.sumsq = torch.empty(slots.pieces, dtype=torch.float64, device=slots.device)
        self.flags = slots.flags()

    def op(self, tensors: TensorList | Pointers | None = None) -> None:
        tensors = self.pointers if tensors is None else tensors
        out = tensors if self.write else None
        self.plan.unscale_norm(tensors, out, self.scale, sumsq=self.sumsq, nonfinite=self.flags)

    def total(self) -> Tensor:
        self.op()
        return self.sumsq.sum().sqrt()

    def others(self, theirs: list[Tensor]) -> dict[str, Run]:
        """Return the contestants of a CUDA device; torch's run over `theirs`."""
        groups = launches(self.tensors, self.plan)
        pieces = max(len(piece.numels) for piece, _ in groups)
        sumsq, flags = self.sumsq.new_empty(pieces), self.flags.new_zeros(pieces)

        def per_chunk() -> None:
            for piece, part in groups:
                n = len(piece.numels)
                out = part if self.write else None
                piece.unscale_norm(part, out, self.scale, sumsq=sumsq[:n], nonfinite=flags[:n])

        found: dict[str, Run] = {
            "raw lists": lambda: self.op(self.tensors),
            "and the total of all slots": self.total,
            "per-chunk launches": per_chunk,
            "torch._foreach_norm alone": lambda: torch._foreach_norm(theirs),
        }
        if self.write:
            params = [torch.nn.Parameter(tensor) for tensor in theirs]
            for param, tensor in zip(params, theirs, strict=True):
                param.grad = tensor
            found["clip_grad_norm_ alone"] = lambda: clip_grad_norm_(params, 1e9)
        return found


def case(name: str, slots: Slots, dtype: torch.dtype, write: bool) -> Case:
    """In place against torch's two steps; reading only, for a fused optimizer, against the same two steps."""
    b = _Operands(slots, dtype, write)
    theirs = [t.clone() for t in b.tensors]
    found_inf, inv_scale = torch.zeros(1, device=slots.device), torch.ones(1, device=slots.device)
    norm, is_cuda = slots.scalar(0.0), slots.device == "cuda"

    def torch_run() -> None:
        if is_cuda and dtype == BF16:  # which GradScaler does not take there: bf16 is unscaled by hand
            torch._foreach_mul_(theirs, 1.0)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(theirs, found_inf, inv_scale)
        norm.copy_(get_total_norm(theirs))

    total = b.total().item()
    torch_run()
    # The norm of torch is a float32 sum over up to `each` terms in unknown order; 1e-3 only catches a wrong
    # formula, tests/ops/test_unscale_norm.py holds the bits.
    check(abs(norm.item() - total) <= (1e-3 if dtype == F32 else 1e-2) * total, name)
    read = b.plan.flat_numel * b.tensors[0].element_size()
    run: Run = b.op if is_cuda else b.total
    others = b.others(theirs) if is_cuda else {}
    return Case(name, run, torch_run, read, read if write else 0, "update" if write else "read", others)


def cases(sizes: Sizes) -> list[Build]:
    few, many, tiny = sizes.few, sizes.many, sizes.tiny
    builds: list[Build] = [
        partial(case, "unscale+check+norm fp32 in place, 8 tensors", few, F32, True),
        partial(case, "unscale+check+norm fp32 in place, 400 tensors", many, F32, True),
        partial(case, "unscale+check+norm fp32 in place, 1000 x 1 KB", tiny, F32, True),
        partial(case, "check+norm fp32 read only, 8 tensors", few, F32, False),
        partial(case, "check+norm bf16 read only, 8 tensors", few, BF16, False),
        partial(case, "check+norm fp32 read only, 1000 x 1 KB", tiny, F32, False),
    ]
    return [*builds, *_more_cases(sizes)] if sizes.is_cuda else builds


def _more_cases(sizes: Sizes) -> list[Build]:
    huge, size, bucket = sizes.huge, sizes.huge_size, sizes.bucket
    few, many = sizes.few, sizes.many
    return [
        partial(case, f"unscale+check+norm fp32 in place, 8 tensors, {size}", huge, F32, True),
        partial(case, f"check+norm fp32 read only, 8 tensors, {size}", huge, F32, False),
        partial(case, f"check+norm bf16 read only, 8 tensors, {size}", huge, BF16, False),
        partial(case, "unscale+check+norm fp16 in place, 8 tensors", few, FP16, True),
        partial(case, "check+norm fp32 read only, 400 tensors", many, F32, False),
        partial(case, "check+norm fp32 read only, one 25 MiB bucket", bucket, F32, False),
    ]
