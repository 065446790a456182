"""Stages share a gradient buffer, whose flush copies to the sum instead of adding to it."""

import torch
from habitat import Outcome, Watch, average_, end_window, mine, net, right_mean, sgd

THREAD = "ServiceNow/Fast-LLM#550"
BUG = "stages that share a buffer overwrite their sum with each micro-batch"
FOUND = ("gradient", "expert.weight", (), "contains only the last micro-batch: earlier micro-batches")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3, 3, 3)
    audit = watch(model, optimizer, every=1)
    shared = [model.expert.weight, model.head.weight]
    sums = [torch.empty_like(param) for param in shared]
    for x in mine(3, 3, 3):
        (model(x) / 3).backward()
        for param, total in zip(shared, sums, strict=True):
            total.copy_(param.grad)  # must add from the second time on
            param.grad.zero_()  # another stage uses the buffer now
    for param, total in zip(shared, sums, strict=True):
        param.grad.copy_(total)
    average_(model.parameters())
    return end_window(audit, model, optimizer, due)
