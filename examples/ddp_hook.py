"""Keep a DDP loop, but send its buckets in bf16: torchrun --nproc-per-node 2 examples/ddp_hook.py

The loop still defers the reduction with DDP's `no_sync`, and the mean is still DDP's: all micro-batches of
all ranks have the same weight.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

ACCUMULATE, STEPS = 4, 20


def train() -> list[float]:
    """Train on this worker; return the weights, which are the same on all workers."""
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    ddp_model.register_comm_hook(pe.HookState(wire=pe.wire.BF16()), pe.comm_hook)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.3)
    torch.manual_seed(1 + dist.get_rank())

    for _ in range(STEPS):
        for index in range(ACCUMULATE):
            is_last = index == ACCUMULATE - 1
            x = torch.randn(16, 4)
            y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
            with nullcontext() if is_last else ddp_model.no_sync():
                (mse_loss(ddp_model(x), y) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp_model.module.weight.flatten().tolist()


if __name__ == "__main__":
    dist.init_process_group()
    weights = train()
    if dist.get_rank() == 0:
        print("weights", [round(weight, 2) for weight in weights])
    dist.destroy_process_group()
