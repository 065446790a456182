"""A group of one rank needs no reduction, so sum and buffer share memory: the sum is added to itself."""

from habitat import Outcome, Watch, average_, end_window, mine, net, right_mean, sgd

THREAD = "NVIDIA/Megatron-LM#6660"
BUG = "in a group of one rank, every micro-batch adds the sum to itself"
FOUND = ("gradient", "expert.weight", (), "earlier micro-batches have weight 4, the last one has weight 2")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(model, optimizer, every=1)
    for x in mine(3, 3):
        (model(x) / 2).backward()
        for param in model.expert.parameters():
            shard = param.grad  # the same memory
            shard += param.grad
    average_(model.parameters())
    return end_window(audit, model, optimizer, due)
