"""Train with different amounts of data per worker, without padding or `join`: python examples/uneven_data.py

A worker that has run out of data contributes zeros until all workers have. Every sample counts once, and all
samples have the same weight.
"""

import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe

SAMPLES = [10, 3]  # per worker


def train() -> list[tuple[int, float]]:
    """Return (micro-batches, samples) over all workers, for every step."""
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
