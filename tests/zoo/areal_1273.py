"""Losses are normalized over the whole batch, and then the pipeline's schedule divides by micro-batches."""

import torch.distributed as dist
from habitat import Outcome, Watch, average_, end_window, everybody, mine, net, right, sgd

THREAD = "areal-project/AReaL PR#1273"
BUG = "a pipeline's schedule divides normalized losses again, by its number of micro-batches"
FOUND = ("gradient", "embed.weight", (), "scaled by 1/3 (1 / the number of micro-batches per rank)")


def train(watch: Watch) -> Outcome:
    model, sizes, world = net(), (2, 5, 3), dist.get_world_size()
    tokens = sum(sizes) * world
    due = right(model, [lambda twin, x=x: twin(x) for x in everybody(*sizes)], tokens)
    optimizer = sgd(model)
    audit = watch(model, optimizer, every=1)
    for x in mine(*sizes):
        audit.count(len(x), divided_by=tokens / world * len(sizes))
        loss = model(x) * world / tokens
        (loss / len(sizes)).backward()
    average_(model.parameters())
    return end_window(audit, model, optimizer, due)
