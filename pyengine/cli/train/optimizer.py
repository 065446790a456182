"""The optimizer and its schedule: the same for every mode."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pyengine.cli.train.arguments import Settings

_WARMUP_STEPS = 10


def make(task_name: str, model: nn.Module, settings: Settings) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return fused AdamW, and a schedule that warms up and then falls linearly to a tenth."""
    steps = settings.steps[task_name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr[task_name], fused=True)
    return optimizer, LambdaLR(optimizer, partial(_shape, steps=steps))


def _shape(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (1 - 0.9 * step / steps)
