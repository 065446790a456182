"""A module is used twice in a step, and its gradient is reduced after the first of its two parts arrives."""

import torch.distributed as dist
from habitat import Outcome, Watch, average_, end_window, everybody, mine, net, right, sgd

THREAD = "deepspeedai/DeepSpeed#8224"
BUG = "a module used twice is reduced after the first of its two subgraphs"
FOUND = ("gradient", "embed.weight", (), "does not contain the gradient of the last backward")


def train(watch: Watch) -> Outcome:
    model, (x,) = net(), mine(4)
    losses = [lambda m, x=x: m(x) + m.embed(2 * x).square().sum() for x in everybody(4)]
    optimizer, due = sgd(model), right(model, losses, dist.get_world_size())
    audit = watch(model, optimizer, every=1)
    model(x).backward(retain_graph=True)
    average_(model.parameters())
    kept = [param.grad.clone() for param in model.embed.parameters()]
    model.embed(2 * x).square().sum().backward()  # an auxiliary loss, which the reduction does not await
    for param, reduced in zip(model.embed.parameters(), kept, strict=True):
        param.grad = reduced
    return end_window(audit, model, optimizer, due)
