"""Every backward is treated as the window's last one, so its reduction clears the sum for the next one."""

from habitat import Outcome, Watch, average_, end_window, mine, net, right_mean, sgd

THREAD = "NVIDIA/Megatron-LM PR#7186"
BUG = "every micro-batch is finalized as the last one, which clears the sum"
FOUND = ("gradient", "embed.weight", (), "contains only the last micro-batch: earlier micro-batches")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3, 3, 3)
    audit = watch(model, optimizer, every=1)
    for x in mine(3, 3, 3):
        for param in model.parameters():
            param.grad = None  # the previous reduction has cleared the sum
        (model(x) / 3).backward()
        average_(model.parameters())
    return end_window(audit, model, optimizer, due)
