"""Each rank divides by its own tokens before the mean over ranks: tokens of ranks with fewer weigh more."""

import torch.distributed as dist
from habitat import Outcome, Watch, average_, data, end_window, net, right, sgd

THREAD = "PrimeIntellect-ai/prime-rl#2358"
BUG = "the loss is divided by each rank's own tokens"
FOUND = ("gradient", "embed.weight", (), "each rank's part was divided by that rank's own count")


def train(watch: Watch) -> Outcome:
    model, sizes = net(), [(8, 7), (2, 1)]
    xs = [x for rank, own in enumerate(sizes) for x in data(rank, own)]
    due = right(model, [lambda twin, x=x: twin(x) for x in xs], sum(map(sum, sizes)))
    optimizer = sgd(model)
    audit = watch(model, optimizer, every=1)
    own = sizes[dist.get_rank()]
    loss_scale = sum(own)
    for x in data(dist.get_rank(), own):
        audit.count(len(x), divided_by=loss_scale)
        (model(x) / loss_scale).backward()
    average_(model.parameters())
    return end_window(audit, model, optimizer, due)
