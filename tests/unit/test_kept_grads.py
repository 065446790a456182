"""Gradients that stay in `.grad` are added to the next window, once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from pyengine.engine.kept_grads import KeptGrads


def _kept() -> tuple[KeptGrads, Parameter, Parameter]:
    first, second = Parameter(torch.zeros(2)), Parameter(torch.zeros(1))
    first.grad = torch.tensor([3.0, 4.0])
    return KeptGrads(["first", "second"], [first, second]), first, second


def test_gradients_the_caller_does_not_own_are_not_kept():
    kept, *_ = _kept()
    kept.keep()
    assert not kept.pending()
    assert kept.save() == {}


def test_kept_gradients_are_added_once():
    kept, first, second = _kept()
    kept.hand_over()
    kept.keep()
    first.grad, second.grad = torch.tensor([-3.0, 0.0]), torch.tensor([3.0])
    assert kept.pending()
    kept.add()
    assert first.grad.tolist() == [0, 4]
    assert second.grad.tolist() == [3]
    assert not kept.pending()


def test_gradients_an_optimizer_has_used_are_not_kept():
    kept, first, second = _kept()
    second.grad = torch.tensor([5.0])
    kept.use([0], torch.tensor(0.0))
    with pytest.warns(UserWarning, match="step 'second' too"):
        kept.keep()
    first.grad, second.grad = None, None
    kept.add()
    assert first.grad is None
    assert second.grad.tolist() == [5]


def test_a_skipped_window_leaves_what_was_kept_before_it():
    kept, first, _ = _kept()
    kept.use([0, 1], torch.tensor(0.0))
    kept.use([], torch.tensor(0.0))
    kept.clear()
    kept.use([1], torch.tensor(0.0))
    kept.keep()
    first.grad = torch.tensor([torch.nan, 1.0])
    kept.add()
    kept.use([1], torch.tensor(1.0))
    kept.keep()
    first.grad = torch.zeros(2)
    kept.add()
    assert first.grad.tolist() == [3, 4]


def test_a_saved_gradient_is_a_copy_and_goes_back_to_the_caller_or_into_the_window():
    kept, first, _ = _kept()
    kept.hand_over()
    saved = kept.save()
    first.grad.zero_()
    assert saved["first"].tolist() == [3, 4]

    kept.load(saved, is_open=True)
    assert (kept.is_used, bool(kept.pending())) == (False, True)
    assert first.grad.tolist() == [0, 0]

    kept.load(saved, is_open=False)
    assert (kept.is_used, bool(kept.pending())) == (True, False)
    assert first.grad.tolist() == [3, 4]


def test_loading_nothing_leaves_the_callers_grad_alone_and_forgets_what_was_kept():
    kept, first, _ = _kept()
    kept.hand_over()
    kept.load({}, is_open=False)
    assert not kept.is_used
    assert first.grad.tolist() == [3, 4]
