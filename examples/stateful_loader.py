"""Resume in the middle of an epoch, with torchdata's StatefulDataLoader: python examples/stateful_loader.py

`sync.windows` reads ahead, so every micro-batch carries the loader's position after it. The example requires
torchdata.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

import pyengine as pe

EPOCHS = 2


def with_position(loader: StatefulDataLoader) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for batch in loader:
        yield batch, loader.state_dict()


def train(folder: Path, saves_after: int | None) -> list[float]:
    """Resume from this rank's file, if there is one; save and stop after `saves_after` windows."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = pe.GradSync(model, accumulate=2)
    loader = StatefulDataLoader(torch.randn(22 - 6 * rank, 8), batch_size=2, shuffle=True)
    parts = {"model": model, "optimizer": optimizer, "sync": sync}
    file, epoch, position = folder / f"rank-{rank}.pt", 0, loader.state_dict()
    if file.exists():
        state = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        epoch, position = state["epoch"], state["position"]
        loader.load_state_dict(position)
    for current in range(epoch, EPOCHS):
        for window in sync.windows(with_position(loader)):
            for x, position in window:  # noqa: B007 - the last position is saved
                sync.backward(model(x).square().sum(), count=len(x))
            sync.step(optimizer)
            if sync.window == saves_after:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**states, "epoch": current, "position": position}, file)
                return []
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


if __name__ == "__main__":
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        undisturbed = pe.launch(train, workers=2, args=(Path(one), None))[0]
        pe.launch(train, workers=2, args=(Path(other), 4))
        resumed = pe.launch(train, workers=2, args=(Path(other), None))[0]
    print("the same bits" if resumed == undisturbed else "not the same bits")
