"""With a shard size of 1, the group over which gradients are reduced has only one rank."""

import torch.distributed as dist
from habitat import Outcome, Watch, end_window, mine, net, right_mean, sgd

THREAD = "verl-project/verl#7493"
BUG = "with fsdp_size=1, gradients are reduced over a shard group of one rank"
FOUND = ("gradient", "embed.weight", (), "not reduced: every rank has only the gradient of its own")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(model, optimizer, every=1)
    shard = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for x in mine(3, 3):
        (model(x) / 2).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=shard)
        param.grad /= dist.get_world_size(shard)
    return end_window(audit, model, optimizer, due)
