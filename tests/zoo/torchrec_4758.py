"""The last forward arms DDP's reducer; in a 1F1B pipeline, the next backward is an earlier micro-batch's."""

from habitat import Outcome, Watch, end_window, mine, net, right_mean, sgd
from torch.nn.parallel import DistributedDataParallel

THREAD = "meta-pytorch/torchrec PR#4758"
BUG = "DDP reduces in an earlier backward than it was prepared for, so later gradients stay local"
FOUND = ("gradient", "embed.weight", (), "the last micro-batch came after the reduction")


def train(watch: Watch) -> Outcome:
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(ddp, optimizer, every=1)
    first, second = mine(3, 3)
    with ddp.no_sync():
        waiting = ddp(first) / 2
    last = ddp(second) / 2  # arms the reducer
    waiting.backward()  # reduces too early
    with ddp.no_sync():
        last.backward()
    return end_window(audit, model, optimizer, due)
