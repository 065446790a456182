"""megatron-core in the window benchmark: here, because it takes a change to torch for the whole process to
run on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.cli.bench.windows.variants import Variant


class Megatron(Variant):
    """megatron-core's DistributedDataParallel: fp32 main_grad, one fp32 all-reduce of each bucket, no
    overlap.

    Its own unscale and clip need its optimizer; the epilogue here is the same work on main_grad with torch's
    calls.
    """

    label = "megatron-core"
    needs = "megatron"

    def setup(self) -> None:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel as MegatronDDP
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.ddp = MegatronDDP(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            self.model,
        )
        self.forward = self.ddp

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        super().micro_batch(x, last=last)
        if last:
            self.ddp.finish_grad_sync()

    def epilogue(self) -> Tensor:
        for p in self.model.parameters():
            main_grad: Tensor = p.main_grad  # type: ignore[attr-defined]
            p.grad = main_grad.to(p.dtype) if p.dtype != main_grad.dtype else main_grad
        return super().epilogue()

    def step(self) -> None:
        super().step()
        self.ddp.zero_grad_buffer()
