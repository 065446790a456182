"""The forward goes past the wrapper: DDP's reducer is never armed, and no backward reduces."""

from habitat import Outcome, Watch, end_window, mine, net, right_mean, sgd
from torch.nn.parallel import DistributedDataParallel

THREAD = "a class: a reducer that never reduces (DDP past its wrapper)"
BUG = "`ddp.module(x)`: DDP's forward, which arms its reducer, does not run"
FOUND = ("gradient", "embed.weight", (), "not reduced: every rank holds what its own micro-batches brought")


def train(watch: Watch) -> Outcome:
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(ddp, optimizer, every=1)
    for x in mine(3, 3):
        (ddp.module(x) / 2).backward()
    return end_window(audit, model, optimizer, due)
