"""Gradients that stay with the caller count into one further window, once."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from pyengine.carry import Carry


def _carry() -> tuple[Carry, Parameter, Parameter]:
    first, second = Parameter(torch.zeros(2)), Parameter(torch.zeros(1))
    first.grad = torch.tensor([3.0, 4.0])
    return Carry(["first", "second"], [first, second]), first, second


def test_what_the_caller_does_not_own_is_not_taken_along():
    carry, *_ = _carry()
    carry.take_along()
    assert not carry.is_pending
    assert carry.save() == {}


def test_kept_gradients_are_added_once_and_change_the_norm():
    carry, first, second = _carry()
    carry.is_callers = True
    carry.take_along()
    first.grad, second.grad = torch.tensor([-3.0, 0.0]), torch.tensor([3.0])
    assert carry.is_pending
    assert carry.add() == 5.0
    assert first.grad.tolist() == [0, 4]
    assert second.grad.tolist() == [3]
    assert not carry.is_pending


def test_a_saved_gradient_is_a_copy_and_goes_back_to_the_caller_or_into_the_window():
    carry, first, _ = _carry()
    carry.is_callers = True
    saved = carry.save()
    first.grad.zero_()
    assert saved["first"].tolist() == [3, 4]

    carry.load(saved, has_begun=True)
    assert (carry.is_callers, carry.is_pending) == (False, True)
    assert first.grad.tolist() == [0, 0]

    carry.load(saved, has_begun=False)
    assert (carry.is_callers, carry.is_pending) == (True, False)
    assert first.grad.tolist() == [3, 4]


def test_loading_nothing_leaves_the_callers_grad_alone_and_forgets_what_was_kept():
    carry, first, _ = _carry()
    carry.is_callers = True
    carry.load({}, has_begun=False)
    assert not carry.is_callers
    assert first.grad.tolist() == [3, 4]
