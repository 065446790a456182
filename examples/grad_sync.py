"""Write a training loop without DDP: python examples/grad_sync.py

The engine owns the gradients. A window consists of 4 micro-batches on each of 2 workers. Gradients are
reduced once per window, during its last backward.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sync = pe.GradSync(model, accumulate=ACCUMULATE, wire=pe.wire.BF16())
    losses: list[float] = []
    sync.on_step(lambda record: losses.append(record.loss))

    for window in sync.windows(micro_batches(dist.get_rank())):
        for x, y in window:
            loss = cross_entropy(model(x), y, reduction="sum")
            sync.backward(loss, count=y.numel())
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
    return losses


if __name__ == "__main__":
    losses, *_ = pe.launch(train, workers=2)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
