"""A step divides gradients by a loss scale that was never applied to a loss."""

import torch.distributed as dist
from habitat import Outcome, Watch, average_, end_window, everybody, mine, net, right, sgd

THREAD = "deepspeedai/DeepSpeed PR#7839"
BUG = "in bf16, the step divides by a loss scale that the backward never applied"
FOUND = ("gradient", "embed.weight", (), "scaled by 1/6.554e+04 (2^-16)")
LOSS_SCALE = 2.0**16


def train(watch: Watch) -> Outcome:
    model, sizes = net(), (4, 4)
    losses = [lambda twin, x=x: twin(x) for x in everybody(*sizes)]
    optimizer, due = sgd(model), right(model, losses, dist.get_world_size())
    audit = watch(model, optimizer, every=1)
    for x in mine(*sizes):
        model(x).backward()
    average_(model.parameters())
    for param in model.parameters():
        param.grad /= LOSS_SCALE  # unscaled, though no loss was scaled
    return end_window(audit, model, optimizer, due)
