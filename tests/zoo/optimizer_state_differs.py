"""One rank continues with the optimizer state of a different checkpoint."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, average_, compare_with_rank_0, mine, net

THREAD = "a class: an optimizer state that differs"
BUG = "one rank has loaded the optimizer's state of another step"
WORLD = 3
FOUND = ("optimizer state", "embed.weight", (1,), "gradients agree, but the optimizer state does not")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    audit = watch(model, optimizer, every=1)
    for step, x in enumerate(mine(3, 3, 3)):
        if step == 1 and dist.get_rank() == 1:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        model(x).backward()
        average_(model.parameters())
        audit.reduced()
        optimizer.step()
        optimizer.zero_grad()
    return compare_with_rank_0(model)
