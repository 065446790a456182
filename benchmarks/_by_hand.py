"""A window that uses `BucketPlan` and torch's collectives, without an engine; a CUDA graph can capture it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pyengine.cli.bench.variants import MAX_NORM, Variant
from pyengine.gradients.layout import ALIGN_ELEMENTS
from pyengine.ops.plan import BucketPlan, add_up


class ByHand(Variant):
    """Windows with a single float32 buffer for the sums of gradients.

    The buffer is all-reduced after the last backward, and one norm is computed. The fused step is skipped on
    the device if a gradient is not finite. The host reads nothing, so each replay of a graph trains a window.
    """

    label = "BucketPlan by hand, no engine"

    def setup(self) -> None:
        self.params = list(self.model.parameters())
        offsets, end = [], 0
        for param in self.params:
            offsets.append(end)
            end += -(-param.numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        self.plan = BucketPlan(offsets, [param.numel() for param in self.params])
        self.sums = torch.zeros(end, device=self.device)
        slots = [self.sums[i : i + p.numel()] for i, p in zip(offsets, self.params, strict=True)]
        self.results = [torch.empty_like(param) for param in self.params]
        self.slots, self.grads = self.plan.pointers(slots), self.plan.pointers(self.results)
        self.sumsq = torch.zeros(len(slots), dtype=torch.float64, device=self.device)
        self.flags = torch.zeros(len(slots), dtype=torch.uint8, device=self.device)
        self.one = torch.ones((), device=self.device)
        self.scale = torch.full((), 1024.0, device=self.device)
        self.growth = torch.zeros((), dtype=torch.int32, device=self.device)
        self.is_first = True

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        """Run one forward and backward, and accumulate the gradients."""
        (self.forward(x) * (self.scale / len(self.micro_batches))).backward()
        grads = [param.grad for param in self.params]
        self.plan.accumulate_(self.sums, grads, self.one, first=self.is_first, nonfinite=self.flags)
        self.is_first = last
        for param in self.params:
            param.grad = None
        if last:
            dist.all_reduce(self.sums)

    def epilogue(self) -> Tensor:
        """Return the norm; the pass of `step` that writes the gradients also unscales and clips them."""
        self.plan.unscale_norm(self.slots, None, self.one, sumsq=self.sumsq, nonfinite=self.flags)
        inv_scale = 1 / (self.scale * dist.get_world_size())
        norm = add_up(self.sumsq).sqrt().float() * inv_scale
        self.found_inf = (~torch.isfinite(norm)).float()
        self.factor = inv_scale * (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def step(self) -> None:
        """Write gradients in the parameters' dtype, step, and update the loss scale as GradScaler does."""
        self.plan.unpack_(self.grads, self.sums, self.factor)
        for param, result in zip(self.params, self.results, strict=True):
            param.grad = result
        self.optimizer.grad_scale, self.optimizer.found_inf = None, self.found_inf
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf
        for param in self.params:
            param.grad = None
        torch._amp_update_scale_(self.scale, self.growth, self.found_inf, 2.0, 0.5, 2000)
