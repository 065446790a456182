"""Gradients left in `.grad` go into states; tests/distributed/test_optimizer_rhythms.py has the windows."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from pyengine.engine.kept_grads import KeptGrads


def test_a_saved_gradient_is_a_copy_and_goes_back_to_the_caller_or_into_the_window():
    first, second = Parameter(torch.zeros(2)), Parameter(torch.zeros(1))
    kept = KeptGrads(["first", "second"], [first, second])
    first.grad = torch.tensor([3.0, 4.0])
    kept.keep()  # the caller does not own them
    assert not kept.pending() and kept.save() == {}
    kept.hand_over()
    saved = kept.save()
    first.grad.zero_()
    assert saved["first"].tolist() == [3, 4]
    kept.load(saved, is_open=True)
    assert (kept.is_used, bool(kept.pending())) == (False, True)
    assert first.grad.tolist() == [0, 0]
    kept.add()  # once
    assert first.grad.tolist() == [3, 4] and not kept.pending()
    first.grad.zero_()
    kept.load(saved, is_open=False)
    assert (kept.is_used, bool(kept.pending())) == (True, False)
    assert first.grad.tolist() == [3, 4]
    kept.load({}, is_open=False)
    assert not kept.is_used
    assert first.grad.tolist() == [3, 4]
