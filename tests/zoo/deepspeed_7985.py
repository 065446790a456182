"""The last micro-batch is added to the sum after the reduction."""

import torch
from habitat import Outcome, Watch, average_, end_window, mine, net, right_mean, sgd

THREAD = "deepspeedai/DeepSpeed PR#7985"
BUG = "gradients are reduced before the last micro-batch is added to the sum"
FOUND = ("gradient", "embed.weight", (), "the last micro-batch came after the reduction")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3, 3, 3)
    audit = watch(model, optimizer, every=1)
    *earlier, x = mine(3, 3, 3)
    for before in earlier:
        (model(before) / 3).backward()
    sums = [param.grad for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    (model(x) / 3).backward()
    last = [param.grad for param in model.parameters()]
    for param, total in zip(model.parameters(), sums, strict=True):
        param.grad = total
    average_(model.parameters())
    torch._foreach_add_(sums, last)
    return end_window(audit, model, optimizer, due)
