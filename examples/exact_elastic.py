"""Resume with fewer workers, and end with the same bits: python examples/exact_elastic.py

One of three workers is killed, and two workers resume the run. docs/reproducible.md explains why the bits are
the same.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe

SEED, STEPS, MICRO_BATCHES = 7, 6, 6


def train(folder: str, dies_at: int | None) -> list[float]:
    """Resume from the last checkpoint, if there is one; return the final parameters."""
    torch.set_num_threads(1)  # rounding depends on the number of threads
    torch.manual_seed(SEED)
    data = torch.randn(MICRO_BATCHES * STEPS, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    sampler = pe.WindowSampler(len(data), seed=SEED, micro_batch=1, global_batch=MICRO_BATCHES)
    exact = pe.Exact(micro_batches=MICRO_BATCHES)
    sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator=exact)
    checkpoint, parts = Path(folder) / "last.pt", {"model": model, "optimizer": optimizer, "sync": sync}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])  # every rank loads rank 0's state
    sampler.set_epoch(0, window=sync.window)
    for step, window in enumerate(sync.windows(sampler), start=sync.window):
        for rows in window:
            with pe.micro_batch_rng(SEED, step=step, index=sync.place):  # dropout is the same on any rank
                sync.backward(model(data[rows]).square().sum(), count=len(rows))
            if step == dies_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        sync.step(optimizer)
        if dist.get_rank() == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        undisturbed, *_ = pe.launch(train, workers=1, args=(one, None))
        try:
            pe.launch(train, workers=3, args=(other, 3))
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        continued, *_ = pe.launch(train, workers=2, args=(other, None))
    print("the same bits" if continued == undisturbed else "not the same bits")
