"""States contain gradients left in `.grad`; tests/distributed/test_optimizer_rhythms.py tests windows."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from pyengine.engine.kept_grads import KeptGrads


def test_a_saved_gradient_is_a_copy_and_goes_back_to_the_caller_as_one():
    first, second = Parameter(torch.zeros(2)), Parameter(torch.zeros(1))
    kept = KeptGrads(["first", "second"], [first, second])
    first.grad = torch.tensor([3.0, 4.0])
    kept.keep()  # keeps nothing: there is no previous window
    assert not kept.pending() and kept.save() == {}
    kept.hand_over()
    saved = kept.save()
    first.grad.zero_()
    assert saved["first"].tolist() == [3, 4]
    kept.load(saved)
    assert (kept.is_used, bool(kept.pending())) == (True, False)
    assert first.grad.tolist() == [3, 4] and first.grad is not saved["first"]
    kept.load({})
    assert not kept.is_used
    assert first.grad.tolist() == [3, 4]


def test_a_sparse_gradient_is_saved_dense():
    table = Parameter(torch.zeros(3, 1))
    kept = KeptGrads(["table"], [table])
    table.grad = torch.sparse_coo_tensor([[1]], [[2.0]], (3, 1))
    kept.hand_over()
    assert kept.save()["table"].tolist() == [[0], [2], [0]]
