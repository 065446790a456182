"""A new owner of gradients is one class; this one keeps sums in `.grad` and overlaps nothing."""

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from pyengine.engine.engine_ranks import EngineRanks
from pyengine.engine.make_engine import make_engine
from pyengine.engine.sync import Sync
from pyengine.gradients.base import Reducer
from pyengine.gradients.published import Published
from pyengine.gradients.settings import Settings
from pyengine.step.stepper import PlainStepper
from pyengine.window.divisor import Divisor
from pyengine.wire import FP32


class GradReducer(Reducer):
    """Lets autograd accumulate in `.grad`, and reduces the gradients one by one after the last backward."""

    def __init__(self, names, params, comm):
        self.names, self.params, self.stepper = names, params, PlainStepper()
        self._comm, self._published, self._works = comm, Published(names, params), []

    def begin(self):
        for param in self.params:
            param.grad = torch.zeros_like(param)

    def reduce(self, header):
        self._divisor = Divisor(header.inv_count, FP32(), header.inv_scale)
        self._works = [self._comm.all_reduce(param.grad) for param in self.params]

    def give_up(self):
        for param in self.params[len(self._works) :]:
            self._comm.all_reduce(param.grad.fill_(torch.nan))

    def finish(self, final):
        for work in self._works:
            work.wait()
        self._published.read(final, self._divisor.after_wire())

    def release(self, *, keeps_grad):
        self._works = []


@on_ranks(2)
def test_an_owner_of_one_class_gives_the_mean_over_the_window():
    model = nn.Linear(2, 1, bias=False)
    named = list(model.named_parameters())
    all_ranks = EngineRanks(named, torch.device("cpu"))
    owner = GradReducer(["weight"], [model.weight], all_ranks.comm)
    engine = make_engine(named, all_ranks, Settings(2), lambda *_: owner, source=model, problems=[])
    for window in Sync(engine).windows(torch.arange(2.0) + 10 * dist.get_rank()):
        for x in window:
            Sync(engine).backward(model(torch.stack([x, x])).sum())
        Sync(engine).step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert model.weight.grad.flatten().tolist() == [5.5, 5.5]  # the mean of 0, 1, 10 and 11
