"""The core's gradient hook records the same as the Python hook of pyengine/audit/probe.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyengine.audit.inventory import Shard, Subject
from pyengine.audit.probe import Leaves, Probe
from pyengine.ops import native

pytestmark = pytest.mark.skipif(native.core() is None, reason="built without the extension")


class _Both:
    """Two probes over the same parameters: the core's, and Python's."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        subjects = [Subject(str(i), p, 0, 0, Shard(0, p.numel(), 1)) for i, p in enumerate(params)]
        self.probes = [Probe(subjects, Leaves(None), torch.device("cpu")) for _ in range(2)]
        self.probes[1]._core = None

    def each(self, act: Callable[[Probe], object]) -> None:
        for probe in self.probes:
            act(probe)

    def agree(self) -> Tensor:
        """Check that both probes have recorded the same; return the sums."""
        first, second = self.probes
        assert first._core is not None
        for of in (Probe.all_sums, lambda probe: probe.sums, lambda probe: probe.last):
            torch.testing.assert_close(of(first), of(second), rtol=0, atol=0)
        assert first.arrivals == second.arrivals
        return first.all_sums()


def _params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    sizes = [(5, 7), (3,), (2000,), ()]
    return [nn.Parameter(torch.randn(size)) for size in sizes]


def _backward(params: list[nn.Parameter]) -> None:
    sum((param.float() ** 3).sum() for param in params).backward()


def test_windows_of_weighted_micro_batches_are_noted_alike():
    params = _params()
    both = _Both(params)
    for turn in range(3):
        both.each(lambda probe, turn=turn: probe.arm(turn))
        for weight in (1.0, 3.0, 0.5):
            both.each(lambda probe, weight=weight: probe.weights_of_next().__setitem__(2, weight))
            _backward(params)
        assert both.probes[0].arrivals == [3, 3, 3, 3]
        sums = both.agree()
        found = 4.5 * 3 * params[2].detach()[turn * 40503 % 250 :: 250] ** 2
        torch.testing.assert_close(sums[2], found)
        both.each(Probe.end)
        for param in params:
            param.grad = None


def test_what_comes_behind_the_end_of_a_window_begins_another():
    params = _params()
    both = _Both(params)
    both.each(lambda probe: probe.arm(0))
    _backward(params)
    both.each(Probe.end)
    _backward(params)
    assert both.probes[0].arrivals == [1, 1, 1, 1]
    both.agree()


def test_gradients_from_before_grad_was_set_to_none_are_kept_separately():
    params = _params()
    both = _Both(params)
    both.each(lambda probe: probe.arm(0))
    _backward(params)
    params[2].grad = None
    _backward(params)
    both.agree()
    once = 3 * params[2].detach()[::250] ** 2
    torch.testing.assert_close(both.probes[0].sums[2], once)
    torch.testing.assert_close(both.probes[0].all_sums()[2], 2 * once)


@pytest.mark.parametrize("grad", [torch.arange(24.0).view(4, 6).t(), torch.arange(24.0, dtype=torch.float64)])
def test_gradients_that_the_core_does_not_read_are_left_to_python(grad: Tensor):
    param = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    both = _Both([param])
    both.each(lambda probe: probe.arm(0))
    for _ in range(2):
        (param * grad).sum().backward()
    torch.testing.assert_close(both.agree()[0], 2 * grad.reshape(-1)[::3].float())


def test_a_model_whose_audit_was_never_taken_off_is_collected():
    params = _params()
    both = _Both(params)
    both.each(lambda probe: probe.arm(0))
    _backward(params)
    gone = weakref.ref(params[0]), weakref.ref(both.probes[0])
    del params, both
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
