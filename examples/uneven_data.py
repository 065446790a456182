"""Workers with different amounts of data: no padding, no `join`: python examples/uneven_data.py

A worker that has run out contributes zeros until all have. Every sample counts once, and as much as any
other.
"""

import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe

SAMPLES = [10, 3]  # of each worker


def train() -> list[tuple[int, float]]:
    """Return (micro-batches, samples) of every step over all workers."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = pe.GradSync(model, accumulate=4)
    steps: list[tuple[int, float]] = []
    sync.on_step(lambda record: steps.append((record.micro_batches, record.count)))

    for window in sync.windows(torch.ones(SAMPLES[dist.get_rank()], 2)):
        for x in window:
            sync.backward(model(x).square().sum(), count=1)
        sync.step(optimizer)
    return steps


if __name__ == "__main__":
    for number, (micro_batches, samples) in enumerate(pe.launch(train, workers=2)[0]):
        print(f"step {number}: {micro_batches} micro-batches, {samples:.0f} samples")
