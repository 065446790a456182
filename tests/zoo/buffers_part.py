"""A router's balancing bias follows the load, and each rank counts only its own tokens."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, average_, mine, net, sgd

THREAD = "a class: buffers that part"
BUG = "a buffer is updated from each rank's own batch (a router's balancing bias)"
FOUND = ("buffer", "bias", (), "a buffer that must be equal on all ranks has different bits")


def train(watch: Watch) -> Outcome:
    model = net()
    model.register_buffer("bias", torch.zeros(4))
    optimizer = sgd(model)
    audit = watch(model, optimizer, every=1)
    for x in mine(3, 3):
        model(x).backward()
        load = x[:, :4].mean(0)  # must be averaged over ranks first
        model.bias += 0.1 * load.sign() + 0.1 * load
        average_(model.parameters())
        audit.reduced()
        optimizer.step()
        optimizer.zero_grad()
    got = model.bias.clone()
    due = got.clone()
    dist.all_reduce(due)
    return Outcome(got, due / dist.get_world_size())
