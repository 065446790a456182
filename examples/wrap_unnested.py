"""Keep a flat loop, as users of Accelerate write it: python examples/wrap_unnested.py

The wrapped optimizer does nothing except at the end of a window, when it also steps the scheduler.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import pyengine as pe

ACCUMULATE, MICRO_BATCHES = 4, 22


def train() -> tuple[int, float]:
    """Return (number of optimizer steps, final learning rate)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = pe.GradSync(model, accumulate=ACCUMULATE)
    optimizer = sync.wrap(sgd, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5))
    steps: list[int] = []
    sync.on_step(lambda record: steps.append(record.step))
    torch.manual_seed(1 + dist.get_rank())

    for index in range(MICRO_BATCHES):
        with sync.accumulate(last=index == MICRO_BATCHES - 1):  # 5 full windows and one of 2 micro-batches
            x = torch.randn(8, 4)
            loss = mse_loss(model(x), x.sum(1, keepdim=True))
            sync.backward(loss)  # a mean with count 1: all micro-batches have the same weight
            optimizer.step()
            optimizer.zero_grad()
    return len(steps), sgd.param_groups[0]["lr"]


if __name__ == "__main__":
    steps, lr = pe.launch(train, workers=2)[0]
    print(f"{steps} optimizer steps for {MICRO_BATCHES} micro-batches, learning rate {lr}")
