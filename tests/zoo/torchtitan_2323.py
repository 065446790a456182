"""The loss is divided by the tokens of all ranks, and DDP still takes the mean over ranks."""

from contextlib import nullcontext

import torch.distributed as dist
from habitat import Outcome, Watch, end_window, everybody, mine, net, right, sgd
from torch.nn.parallel import DistributedDataParallel

THREAD = "pytorch/torchtitan PR#2323"
BUG = "losses are divided by the tokens of all ranks, and then again by the number of ranks"
FOUND = ("gradient", "embed.weight", (), "scaled by 1/2 (1 / the number of ranks")


def train(watch: Watch) -> Outcome:
    model, sizes = net(), (2, 5, 3)
    ddp, tokens = DistributedDataParallel(model), sum(sizes) * dist.get_world_size()
    due = right(model, [lambda twin, x=x: twin(x) for x in everybody(*sizes)], tokens)
    optimizer = sgd(model)
    audit = watch(ddp, optimizer, every=1)
    for index, x in enumerate(mine(*sizes)):
        with nullcontext() if index == 2 else ddp.no_sync():
            audit.count(len(x), divided_by=tokens)
            (ddp(x) / tokens).backward()
    return end_window(audit, model, optimizer, due)
