"""One bit of one weight changes on one rank, in memory, between two steps."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, average_, compare_with_rank_0, mine, net, sgd

THREAD = "a class: a flipped bit"
BUG = "one bit of one weight changes on one rank"
WORLD = 3
FOUND = ("parameter", "expert.weight", (2,), "gradients and optimizer state agree, and it has other bits")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer = sgd(model)
    audit = watch(model, optimizer, every=1)
    for step, x in enumerate(mine(3, 3, 3)):
        if step == 1 and dist.get_rank() == 2:
            model.expert.weight.data.view(torch.int32)[3, 5] ^= 1 << 25
        model(x).backward()
        average_(model.parameters())
        audit.reduced()
        optimizer.step()
        optimizer.zero_grad()
    return compare_with_rank_0(model)
