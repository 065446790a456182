"""One rank's schedule is a step ahead of the others'."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, average_, compare_with_rank_0, mine, net, sgd

THREAD = "a class: a learning rate that differs"
BUG = "one rank's scheduler has stepped once more"
FOUND = ("hyperparameters", "", (), "lr of group 0 differs (rank 0: 0.01; rank 1: 0.005)")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    audit = watch(model, optimizer, every=1)
    for step, x in enumerate(mine(3, 3)):
        model(x).backward()
        average_(model.parameters())
        audit.reduced()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and dist.get_rank() == 1:
            schedule.step()
    return compare_with_rank_0(model)
