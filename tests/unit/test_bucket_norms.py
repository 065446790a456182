"""Norms of DDP's buckets, read as they land (pyengine/gradients/ddp/bucket_norms.py)."""

import torch
from torch import Tensor

from pyengine.gradients.ddp.bucket_norms import AllBucketNorms
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


def three() -> tuple[list[Tensor], AllBucketNorms, Bucket, Bucket]:
    """Parameters of 2, 3 and 1 elements; the last two lie in the first bucket, in the order of readiness."""
    params = [torch.empty(2), torch.empty(3), torch.empty(1)]
    norms = AllBucketNorms({param: index for index, param in enumerate(params)})
    first = Bucket([params[2], params[1]], torch.tensor([1.0, 2.0, 2.0, 2.0]))
    return params, norms, first, Bucket([params[0]], torch.tensor([3.0, 4.0]))


def land(norms: AllBucketNorms, bucket: Bucket) -> None:
    flat = bucket.buffer()
    norms.of(bucket).land_flat(flat, flat, ONE, writes=False)


def test_every_parameter_s_sum_of_squares_goes_to_its_place() -> None:
    _, norms, first, second = three()
    norms.begin()
    land(norms, first)
    land(norms, second)
    final = FinalPass(3, CPU)
    assert norms.settle(final)
    assert torch.equal(final.sumsq, torch.tensor([25.0, 12.0, 1.0], dtype=torch.float64))
    assert torch.equal(final.nonfinite, torch.zeros(3, dtype=torch.uint8))


def test_what_travelled_narrow_is_written_and_read_as_it_was_rounded() -> None:
    _, norms, first, second = three()
    norms.begin()
    land(norms, second)
    moved = torch.tensor([2.0, 4.0, float("inf"), 4.0], dtype=torch.bfloat16)
    norms.of(first).land_flat(moved, first.buffer(), torch.tensor(0.5), writes=True)
    final = FinalPass(3, CPU)
    assert norms.settle(final)
    assert torch.equal(first.buffer(), torch.tensor([1.0, 2.0, float("inf"), 2.0]))
    assert final.sumsq[2] == 1
    assert torch.equal(final.nonfinite, torch.tensor([0, 1, 0], dtype=torch.uint8))


def test_a_bucket_that_has_not_landed_in_this_window_is_told() -> None:
    _, norms, first, second = three()
    norms.begin()
    land(norms, first)
    land(norms, second)
    norms.begin()
    land(norms, first)
    norms.of(second)  # handed out, and lost
    assert not norms.settle(FinalPass(3, CPU))


def test_buckets_that_ddp_has_rebuilt_have_norms_of_their_own() -> None:
    params, norms, first, _ = three()
    norms.begin()
    land(norms, first)
    norms.begin()
    land(norms, Bucket(params[::-1], torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 0.0])))
    final = FinalPass(3, CPU)
    assert norms.settle(final)
    assert torch.equal(final.sumsq, torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64))
