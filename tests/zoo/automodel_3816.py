"""Each expert-parallel group clips shared gradients by a norm that includes only its own experts."""

import torch
import torch.distributed as dist
from habitat import Outcome, Watch, average_, flat, mine, net, right_mean, sgd

THREAD = "NVIDIA-NeMo/Automodel#3816"
BUG = "the norm is not summed over expert-parallel groups, so each group clips by a different factor"
FOUND = ("gradient", "embed.weight", (), "equal up to a factor that differs between ranks")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3)
    watch(model, optimizer, every=1, groups={"expert.*": None})
    (x,) = mine(3)
    model(x).backward()
    experts = [*model.expert.parameters()]
    average_(param for param in model.parameters() if all(param is not own for own in experts))
    for param in experts:
        param.grad *= 1 + 9 * dist.get_rank()  # every rank has a different expert
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    got = flat(model)
    optimizer.step()
    return Outcome(got[: 6 * 16], due[: 6 * 16] / due.norm())
