"""The model was moved there and back: `.grad` has memory of its own, and the bucket is reduced without it."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, end_window, mine, net, right_mean, sgd

THREAD = "a class: a stale bucket view"
BUG = "after `model.to(...)` and back, `.grad` views the bucket no more, which is reduced all the same"
FOUND = ("gradient", "embed.weight", (), "not reduced: every rank holds what its own micro-batches brought")


def train(watch: Watch) -> Outcome:
    model = net()
    bucket = torch.zeros(sum(param.numel() for param in model.parameters()))
    for param, view in zip(
        model.parameters(), bucket.split([p.numel() for p in model.parameters()]), strict=True
    ):
        param.grad = view.view_as(param)
    model.to(torch.float64).to(torch.float32)  # for a checkpoint, say
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(model, optimizer, every=1)
    for x in mine(3, 3):
        (model(x) / 2).backward()
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    return end_window(audit, model, optimizer, due)
