"""Keep the global batch and its learning rate on any number of workers: python examples/global_batch.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyengine as pe

GLOBAL_BATCH, MICRO_BATCH, EPOCHS, SAMPLES = 96, 8, 2, 480


def train() -> tuple[int, list[float]]:
    """Return (micro-batches per window on this worker, learning rate after every step)."""
    pe.seed_everything(0)
    inputs = torch.randn(SAMPLES, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    plan = pe.plan_batch(global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, world_size=dist.get_world_size())
    steps = EPOCHS * plan.steps_per_epoch(len(data))
    lr = pe.scale_lr(0.1, from_batch=32, to_batch=GLOBAL_BATCH, rule="linear")

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    after = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps - 2
    )
    scheduler = pe.warm_up(after, steps=2, start_factor=32 / GLOBAL_BATCH)
    sampler = pe.WindowSampler(len(data), seed=0, micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    loader = DataLoader(data, batch_sampler=sampler)
    sync = pe.GradSync(model, accumulate=plan.accumulate)

    rates: list[float] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for window in sync.windows(loader):
            for x, y in window:
                sync.backward((model(x) - y).square().sum(), count=len(y))
            sync.step(optimizer, scheduler)  # once per optimizer step, whatever the number of workers
            rates.append(scheduler.get_last_lr()[0])
    return plan.accumulate, rates


if __name__ == "__main__":
    for workers in (1, 2):
        accumulate, rates = pe.launch(train, workers=workers)[0]
        print(f"{workers} × {accumulate} × {MICRO_BATCH}:", [round(rate, 3) for rate in rates])
