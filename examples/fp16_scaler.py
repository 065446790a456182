"""Train in fp16, and skip a step on all workers if one overflows: python examples/fp16_scaler.py"""

import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe

STEPS, BAD_STEP = 4, 2


def train() -> list[tuple[bool, str, float]]:
    """Return (skipped, reason, loss scale after the step) for every step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = pe.GradSync(model, accumulate=2)  # sums in fp32, whatever the parameters' dtype
    sync.scaler = pe.GradScaler("cpu", init_scale=1024.0)  # same arguments and state as torch's
    told: list[tuple[bool, str, float]] = []
    sync.on_step(lambda record: told.append((record.skipped, record.reason, sync.scaler.get_scale())))

    inputs = torch.ones(2 * STEPS, 8, 4, dtype=torch.float16)
    if dist.get_rank() == 1:
        inputs[2 * BAD_STEP] *= 60000.0  # so large that the loss overflows fp16
    for window in sync.windows(inputs):
        for x in window:
            sync.backward(model(x).square().mean())  # scales the loss
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)  # unscales, steps or skips, and updates the scale
    return told


if __name__ == "__main__":
    for number, (skipped, why, scale) in enumerate(pe.launch(train, workers=2)[0]):
        print(f"step {number}: {f'skipped, {why}' if skipped else 'taken'}; scale {scale:.0f}")
