"""What a window costs the host, counted in calls of this package's functions."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

OURS = str(Path(pe.__file__).parent)
MOST = {"engine": 720, "attach": 730}  # 695 and 702 on Python 3.11; a wait adds a few


class Calls:
    """Counts calls of functions of this package."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        self.num += event == "call" and frame.f_code.co_filename.startswith(OURS)


@pytest.mark.parametrize("kind", MOST)
@on_ranks(2)
def test_a_warm_window_of_two_layers_takes_few_calls(kind):
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    forward = DistributedDataParallel(model, gradient_as_bucket_view=True) if kind == "attach" else model
    sync = pe.GradSync(model, accumulate=2) if kind == "engine" else pe.attach(forward, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = Calls()
    try:
        for number, window in enumerate(sync.windows(torch.randn(16, 2, 8))):
            for x in window:
                sync.backward(forward(x).sum(), count=2)
            sync.clip_grad_norm_(1.0)
            sync.step(optimizer)
            if number == 4:  # count from here to the same point of the next window
                sys.setprofile(calls)
            elif number == 5:
                sys.setprofile(None)
    finally:
        sys.setprofile(None)
    assert 100 < calls.num <= MOST[kind]
