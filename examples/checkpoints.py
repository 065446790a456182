"""Resume after a worker was killed, and end with the same bits: python examples/checkpoints.py

A worker may die after one rank has saved and before the other has. Therefore each rank keeps its last two
saves. docs/reliability.md explains the rules.
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
    """Resume from the newest step that all ranks have saved; return that step and the final parameters."""
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(STEPS, 2, 16)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = pe.GradSync(model)
    parts = {"model": model, "optimizer": optimizer, "sync": sync}
    files = [folder / f"step-{step}.rank-{rank}.pt" for step in range(STEPS + 1)]
    by_rank: list[list[int]] = [[]] * world_size
    dist.all_gather_object(by_rank, [step for step, file in enumerate(files) if file.exists()])
    start = max(set.intersection(*map(set, by_rank)), default=0)
    if start:
        state = torch.load(files[start], weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for step in range(start, STEPS):
        if step == dies_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with sync.accumulate():
            sync.backward(model(data[step, rank]).square().sum())
        sync.step(optimizer)
        file = files[step + 1]
        torch.save({name: part.state_dict() for name, part in parts.items()}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # atomic: the file is complete or absent
        files[max(step - 1, 0)].unlink(missing_ok=True)
    return start, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        undisturbed = pe.launch(train, workers=2, args=(Path(one), None))[0]
        try:
            pe.launch(train, workers=2, args=(Path(other), 4))
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        continued = pe.launch(train, workers=2, args=(Path(other), None))[0]
    print(f"went on behind step {continued[0]}")
    print("the same bits" if continued[1] == undisturbed[1] else "not the same bits")
