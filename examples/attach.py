"""Keep DDP, and reduce gradients once per window: torchrun --nproc-per-node 2 examples/attach.py

The DDP loop becomes two nested loops (over windows, and over their micro-batches) with `sync.backward` and
`sync.step`. It needs neither `no_sync` nor `loss / N`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

ACCUMULATE, WINDOWS = 4, 20


def micro_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a worker's share of a toy task: which of ten numbers is the largest?"""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.rand(ACCUMULATE * WINDOWS, 32, 10, generator=generator)
    return [(x, x.argmax(1)) for x in inputs]


def train() -> list[float]:
    """Train on this worker; return the loss of every step over all workers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 10))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-2, fused=True)
    sync = pe.attach(ddp_model, accumulate=ACCUMULATE)
    losses: list[float] = []
    sync.on_step(lambda record: losses.append(record.loss))

    for window in sync.windows(micro_batches(dist.get_rank())):
        for x, y in window:
            loss = cross_entropy(ddp_model(x), y, reduction="sum")
            sync.backward(loss, count=y.numel())
        sync.step(optimizer)
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    losses = train()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    dist.destroy_process_group()
