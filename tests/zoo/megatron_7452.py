"""The second head's loss is a mean over each rank's own tokens, whose number differs between ranks."""

import torch.distributed as dist
from habitat import Outcome, Watch, average_, end_window, everybody, mine, net, right, sgd

THREAD = "NVIDIA/Megatron-LM#7452"
BUG = "the loss of the second head (MTP) is divided by each rank's own tokens"
FOUND = ("gradient", "head2.weight", (), "each rank's part was divided by that rank's own count")


def train(watch: Watch) -> Outcome:
    model, (x,) = net(), mine(6)
    tokens, mtp = 6, (6, 2)  # for the main loss on every rank; for the second head, by rank
    parts = list(zip(everybody(6), mtp, strict=True))
    losses = [lambda m, x=x, n=n: m.losses(x)[0] / 12 + m.losses(x[:n])[1] / sum(mtp) for x, n in parts]
    optimizer, due = sgd(model), right(model, losses, 1.0)
    audit = watch(model, optimizer, every=1)
    own = mtp[dist.get_rank()]
    audit.count(tokens)
    audit.count(own, divided_by=own / tokens, names="head2.*")
    (model.losses(x)[0] + model.losses(x[:own])[1] * tokens / own).backward()
    average_(model.parameters())
    for param in model.parameters():
        param.grad /= tokens  # the mean over ranks becomes a mean over all tokens
    return end_window(audit, model, optimizer, due)
