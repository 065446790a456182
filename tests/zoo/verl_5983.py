"""Tokens are counted over the data-parallel group, without the ranks that hold other parts of a sequence."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, average_, end_window, everybody, mine, net, right, sgd

THREAD = "verl-project/verl#5983"
BUG = "tokens are summed over a group without the context-parallel ranks"
FOUND = ("gradient", "embed.weight", (), "scaled by 2 (the number of ranks")


def train(watch: Watch) -> Outcome:
    model, (x,), world = net(), mine(4), dist.get_world_size()  # one sequence, half of it on each rank
    due = right(model, [lambda twin, x=x: twin(x) for x in everybody(4)], 4 * world)
    optimizer = sgd(model)
    audit = watch(model, optimizer, every=1)
    tokens = torch.tensor(float(len(x)))
    groups = [dist.new_group([rank]) for rank in range(world)]  # data-parallel: one rank each
    dist.all_reduce(tokens, group=groups[dist.get_rank()])
    audit.count(len(x), divided_by=float(tokens) / world)
    (model(x) * world / tokens).backward()  # times the context-parallel ranks, for the mean over them
    average_(model.parameters())
    return end_window(audit, model, optimizer, due)
