"""Kill a worker in the middle, start again, end with the same bits: python examples/checkpoints.py

docs/reliability.md tells what is kept and what is refused.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe

STEPS = 6


def train(folder: Path, dies_at: int | None) -> tuple[int, list[float]]:
    """Go on from the newest checkpoint; return the step it was of, and the parameters at the end."""
    torch.manual_seed(0)
    data = torch.randn(STEPS, 2, 16)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = pe.GradSync(model)
    checkpoints, start = pe.Checkpoints(folder), 0
    found = checkpoints.load()
    if found is not None:
        start = found.step
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        sync.load_state_dict(found.state["sync"])
    for step in range(start, STEPS):
        if step == dies_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with sync.accumulate():
            sync.backward(model(data[step, dist.get_rank()]).square().sum())
        sync.step(optimizer)
        parts = {"model": model, "optimizer": optimizer, "sync": sync}
        checkpoints.save(step + 1, {name: part.state_dict() for name, part in parts.items()})
    return start, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = pe.launch(train, workers=2, args=(Path(folder) / "one", None))[0]
        try:
            pe.launch(train, workers=2, args=(Path(folder) / "other", 4))
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        continued = pe.launch(train, workers=2, args=(Path(folder) / "other", None))[0]
    print(f"went on behind step {continued[0]}")
    print("the same bits" if continued[1] == undisturbed[1] else "not the same bits")
