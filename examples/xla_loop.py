"""Train on every XLA device of a host: python examples/xla_loop.py

On a TPU host, the command works as it is. The script needs only torch_xla and pyengine. Without a TPU,
PJRT_DEVICE=CPU runs it on one replica.
"""

from __future__ import annotations

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import nn
from torch.nn.functional import cross_entropy

import pyengine as pe

ACCUMULATE, MICRO_BATCH, WINDOWS = 8, 32, 20
DIGITS = 10


def main(index: int) -> None:
    """Train one replica; torch_xla starts one replica per device."""
    del index
    device = torch_xla.device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIGITS, 256), nn.GELU(), nn.Linear(256, DIGITS)).to(device)
    sync = pe.GradSync(model, accumulate=ACCUMULATE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, capturable=True
    )  # the step count is on the device
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WINDOWS)
    if xr.global_ordinal() == 0:
        sync.on_step(
            lambda record: print(f"step {record.step}: loss {record.loss:.4f}, norm {record.grad_norm:.4f}")
        )

    for window in sync.windows(micro_batches(xr.global_ordinal())):
        for x, y in window:
            loss = cross_entropy(model(x.to(device)), y.to(device), reduction="sum")
            sync.backward(loss, count=y.numel())
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer, scheduler)


def micro_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this replica's share of a toy task: which digit is the largest?"""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.rand(WINDOWS * ACCUMULATE, MICRO_BATCH, DIGITS, generator=generator)
    return [(x, x.argmax(1)) for x in inputs]


if __name__ == "__main__":
    torch_xla.launch(main)
