"""Norms of DDP's buckets, read when each bucket completes (pyengine/gradients/ddp/bucket_norms.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyengine.gradients.ddp import bucket_norms
from pyengine.gradients.ddp.bucket_norms import BucketNorms
from pyengine.window.final_pass import FinalPass

ONE = torch.ones(())
CPU = torch.device("cpu")


class Bucket:
    """What of DDP's bucket is looked at."""

    def __init__(self, params: list[Tensor], flat: Tensor) -> None:
        self._params, self._flat = params, flat

    def parameters(self) -> list[Tensor]:
        return self._params

    def buffer(self) -> Tensor:
        return self._flat


def three() -> tuple[list[Tensor], BucketNorms, Bucket, Bucket]:
    """Parameters of 2, 3 and 1 elements; the last two lie in the first bucket, in the order of readiness."""
    params = [torch.empty(2), torch.empty(3), torch.empty(1)]
    norms = BucketNorms({param: index for index, param in enumerate(params)}, CPU)
    first = Bucket([params[2], params[1]], torch.tensor([1.0, 2.0, 2.0, 2.0]))
    second = Bucket([params[0]], torch.tensor([3.0, 4.0]))
    norms.begin()
    return params, norms, first, second


def read(norms: BucketNorms, *buckets: Bucket) -> None:
    for bucket in buckets:
        norms.of(bucket)(bucket.buffer(), None, ONE)


def complete(norms: BucketNorms) -> FinalPass:
    final = FinalPass(3, CPU)
    assert norms.copy_if_complete(final)
    return final


def test_a_bucket_reduced_in_a_narrow_type_has_the_norms_of_its_rounded_values():
    _, norms, first, second = three()
    read(norms, second)
    moved = torch.tensor([2.0, 4.0, float("inf"), 4.0], dtype=torch.bfloat16)
    norms.of(first)(moved, first.buffer(), torch.tensor(0.5))
    final = complete(norms)
    assert first.buffer().tolist() == [1, 2, float("inf"), 2]
    assert final.sumsq.tolist() == [25, float("inf"), 1]
    assert final.nonfinite.tolist() == [0, 1, 0]
    first.buffer()[2] = 2.0
    norms.begin()  # a window knows nothing of the one before it
    read(norms, first, second)
    assert complete(norms).nonfinite.tolist() == [0, 0, 0]


def test_without_a_bucket_of_this_window_nothing_is_handed_over():
    _, norms, first, second = three()
    late = norms.of(second)
    read(norms, first, second)
    norms.begin()
    read(norms, first)
    norms.of(second)  # handed out, and lost
    late(second.buffer(), None, ONE)  # belongs to its own window
    final = FinalPass(3, CPU)
    assert not norms.copy_if_complete(final)
    assert final.sumsq.tolist() == [0, 0, 0]


@pytest.mark.parametrize("is_announced", [True, False])
def test_buckets_that_ddp_has_rebuilt_get_a_new_layout(is_announced):
    params, norms, first, second = three()
    read(norms, first, second)
    rebuilt = Bucket(params[::-1], torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 0.0]))
    if is_announced:
        norms.lay_out(lambda: pytest.fail("DDP makes new memory for all of them"))
    norms.begin()
    read(norms, rebuilt)
    assert complete(norms).sumsq.tolist() == [4, 3, 1]


def test_a_bucket_of_a_parameter_that_is_not_known_is_left_alone():
    params, norms, *_ = three()
    strange = Bucket([params[0], torch.empty(1)], torch.tensor([3.0, 4.0, 5.0]))
    assert norms.of(strange) is None


def test_on_an_accelerator_buckets_get_their_layout_before_the_first_completes(monkeypatch):
    monkeypatch.setattr(bucket_norms, "runs_ahead", lambda device: True)
    params = [torch.empty(8), torch.empty(16), torch.empty(3)]
    norms = BucketNorms({param: index for index, param in enumerate(params)}, CPU)
    first, second = Bucket([params[1], params[0]], torch.ones(24)), Bucket([params[2]], torch.ones(3))
    assert norms.of(first) is None
    norms.lay_out(lambda: [first, second])
    norms.begin()
    read(norms, second)
    assert not norms.copy_if_complete(FinalPass(3, CPU))
    read(norms, first)
    assert complete(norms).sumsq.tolist() == [8, 16, 3]
    odd = Bucket([params[2], params[0]], torch.ones(11))
    norms.lay_out(lambda: [odd, Bucket([params[1]], torch.ones(16))])
    assert norms.of(odd) is None
