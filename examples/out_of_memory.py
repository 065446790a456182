"""Split a batch into smaller parts on workers that run out of memory: python examples/out_of_memory.py

A worker gets its share of the batch as one micro-batch, and finds the part size that fits by itself. Other
workers need not know this size, and the gradient is that of the whole batch. The script simulates workers
with little memory. On a GPU, leave out `ROOM`.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe

SHARE = 32  # samples per worker and step
ROOM = [64, 5]  # samples that fit into each worker's memory
STEPS = 10


def train() -> tuple[int | None, int, float]:
    """Return (part size, or None if all fits; number of failures; largest difference from plain torch)."""
    warnings.simplefilter("ignore")  # pyengine warns of every smaller size
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 1), nn.Linear(4, 1)
    twin.load_state_dict(model.state_dict())
    data = torch.randn(STEPS, world_size, SHARE, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = pe.GradSync(model, accumulate=1)
    failed: list[int] = []
    sync.on_step(lambda record: failed.append(record.num_retries))

    def train_part(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if len(x) > ROOM[rank]:
            raise torch.OutOfMemoryError
        return (model(x) - x.sum(1, keepdim=True)).square().sum(), len(x)

    for window in sync.windows(data[:, rank]):
        for batch in window:
            sync.retry_smaller(batch, train_part)
        sync.step(optimizer)

    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for x in data.flatten(1, 2):
        plain.zero_grad()
        (twin(x) - x.sum(1, keepdim=True)).square().mean().backward()
        plain.step()
    return sync.part_size, sum(failed), float((model.weight - twin.weight).abs().max())


if __name__ == "__main__":
    for worker, (size, num, difference) in enumerate(pe.launch(train, workers=2)):
        size = size or SHARE
        print(f"worker {worker}: parts of {size} samples, {num} failures, {difference:.0e} from plain torch")
