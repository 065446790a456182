"""A collective fails, and the error stays in a future that nobody looks at."""

import torch
from habitat import Outcome, Watch, average_, end_window, mine, net, right_mean, sgd

THREAD = "a class: a swallowed collective error"
BUG = "a bucket's all-reduce fails, and the callback behind it does not look at its future"
FOUND = ("gradient", "head.weight", (), "not reduced: every rank holds what its own micro-batches brought")


def train(watch: Watch) -> Outcome:
    model = net()
    optimizer, due = sgd(model), right_mean(model, 3, 3)
    audit = watch(model, optimizer, every=1)
    for x in mine(3, 3):
        (model(x) / 2).backward()
    failed = [model.head.weight, model.head.bias]
    average_(param for param in model.parameters() if all(param is not other for other in failed))
    work: torch.futures.Future[None] = torch.futures.Future()
    reduced = work.then(lambda future: None)  # must ask for its value
    work.set_exception(RuntimeError("connection closed by peer"))
    reduced.wait()
    return end_window(audit, model, optimizer, due)
