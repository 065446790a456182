"""A set of parameters is complete when its last gradient arrives, in any order of arrival."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from pyengine.gradients.arrival import Arrivals, Watch, may_nest


def _complete(order: tuple[int, ...], frozen: tuple[int, ...]) -> list[set[int]]:
    """Compute three parameters' gradients in this order; return which had arrived at each completion."""
    params = [Parameter(torch.ones(1), requires_grad=index not in frozen) for index in range(3)]
    arrived: set[int] = set()
    complete: list[set[int]] = []
    for index, param in enumerate(params):
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, index=index: arrived.add(index))
    watch = Watch(params, arrived.__contains__, lambda: complete.append(set(arrived)))
    watch.start()
    for index in order:
        params[index].sum().backward()
    watch.stop()
    for param in params:
        if param.requires_grad:
            param.sum().backward()  # the watch has stopped
    return complete


@pytest.mark.parametrize(
    ("order", "frozen", "complete"),
    [
        *((order, (), [{0, 1, 2}]) for order in itertools.permutations(range(3))),
        ((0, 1), (), []),
        ((2, 0), (), []),
        ((0, 2), (1,), [{0, 2}]),
        ((1,), (0, 2), [{1}]),
        ((), (0, 1, 2), [set()]),
    ],
    ids=str,
)
def test_a_set_is_complete_once_with_the_last_gradient_that_is_not_frozen(order, frozen, complete):
    assert _complete(order, frozen) == complete


@pytest.mark.parametrize(
    ("came", "order", "repeated"),
    [([], [], set()), ([1, 0, 2], [1, 0, 2], set()), ([1, 0, 1], [0, 1], {1}), ([0, 0, 0], [0], {0})],
    ids=str,
)
def test_arrivals_are_in_the_order_of_the_last_time(came, order, repeated):
    params = {index: Parameter(torch.ones(1)) for index in range(3)}
    arrivals = Arrivals(params)
    with arrivals.recorded():
        for index in came:
            params[index].sum().backward()
    params[2].sum().backward()  # after the recording
    assert (arrivals.order, arrivals.repeated) == (order, repeated)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


LOSSES = {
    "plain": (lambda x: x.square().sum(), False),
    "no graph": (lambda x: x.detach(), False),
    "not reentrant": (lambda x: checkpoint(torch.square, x, use_reentrant=False).sum(), False),
    "a function of its own": (lambda x: Twice.apply(x).sum(), True),
    "below others": (lambda x: (Twice.apply(x) + x).exp().sum(), True),
    "reentrant": (lambda x: checkpoint(torch.square, x, use_reentrant=True).sum(), True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_python_function_may_run_a_backward_inside(name):
    loss, nests = LOSSES[name]
    assert may_nest(loss(torch.ones(2, requires_grad=True))) is nests
