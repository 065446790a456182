"""A tensor that is larger than the bucket's cap is left out of every bucket."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, end_window, mine, net, right_mean, sgd

THREAD = "meta-pytorch/torchft, bucketised all-reduce"
BUG = "a tensor larger than the bucket's cap is never sent"
FOUND = ("gradient", "expert.weight", (), "not reduced: every rank has only the gradient of its own")


def train(watch: Watch) -> Outcome:
    model, cap = net(), 200
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(model, optimizer, every=1)
    for x in mine(3, 3):
        (model(x) / 2).backward()
    grads = [param.grad for param in model.parameters()]
    for start in range(0, len(grads), 2):
        packed = [grad for grad in grads[start : start + 2] if grad.numel() <= cap]
        bucket = torch.cat([grad.flatten() for grad in packed])
        dist.all_reduce(bucket)
        for grad, part in zip(packed, bucket.split([g.numel() for g in packed]), strict=True):
            grad.copy_(part.view_as(grad) / dist.get_world_size())
    return end_window(audit, model, optimizer, due)
