"""An op over many tensors launches pending work at the last tensor's last chunk; an empty tensor has none."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, average_, end_window, mine, net, right_mean, sgd
from torch import Tensor

THREAD = "NVIDIA/apex multi_tensor_apply (ROCm/apex#54)"
BUG = "the last tensor is empty and has no chunk, so pending work is never launched"
FOUND = ("gradient", "embed.weight", (), "scaled by 2 (the number of ranks")


def multi_tensor_scale(tensors: list[Tensor], scale: float) -> None:
    pending = []
    for index, tensor in enumerate(tensors):
        for chunk in tensor.view(-1).split(65536) if tensor.numel() else []:
            pending.append(chunk)
            if index == len(tensors) - 1:
                torch._foreach_mul_(pending, scale)


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3)
    audit = watch(model, optimizer, every=1)
    model(mine(3)[0]).backward()
    average_(model.parameters())
    summed = [param.grad.mul_(dist.get_world_size()) for param in model.parameters()]
    multi_tensor_scale([*summed, torch.empty(0)], 1 / dist.get_world_size())
    return end_window(audit, model, optimizer, due)
