"""DDP ignores an expert, whose local gradient then enters the norm by which shared gradients are clipped."""

import torch
from habitat import Outcome, Watch, flat, mine, net, right_mean, sgd
from torch.nn.parallel import DistributedDataParallel

THREAD = "a class: parameters that DDP ignores in the norm"
BUG = "gradients that DDP does not reduce enter the norm by which all others are clipped"
FOUND = ("gradient", "embed.weight", (), "reduced correctly, but no longer equal after the reduction")


def train(watch: Watch) -> Outcome:
    model = net()
    ignored = ["expert.weight", "expert.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    optimizer, due = sgd(model), right_mean(model, 3)
    audit = watch(ddp, optimizer, every=1)
    ddp(mine(3)[0]).backward()
    audit.reduced()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    got = flat(model)
    optimizer.step()
    return Outcome(got[: 6 * 16], due[: 6 * 16] / due.norm())
