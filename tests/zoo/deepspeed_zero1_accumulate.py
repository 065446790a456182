"""If the dtype of sums differs from the model's, the reduction uses one copy and the step uses another."""

import torch.distributed as dist
from habitat import Outcome, Watch, end_window, mine, net, right_mean, sgd

THREAD = "DeepSpeed ZeRO-1, grad_accum_dtype"
BUG = "a converted copy of the sum is reduced, but the optimizer steps with another copy"
FOUND = ("gradient", "embed.weight", (), "not reduced: every rank has only the gradient of its own")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(model, optimizer, every=1)
    for x in mine(3, 3):
        (model(x) / 2).backward()
    for param in model.parameters():
        converted = param.grad.bfloat16()
        dist.all_reduce(converted)
        converted /= dist.get_world_size()
        param.grad = param.grad.float()  # a new copy of the sum, not the reduced copy
    return end_window(audit, model, optimizer, due)
