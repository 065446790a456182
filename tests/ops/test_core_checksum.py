"""The core's checksum equals the definition in PyTorch operators, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from pyengine.audit.checksum import BlockSums, Part
from pyengine.ops import native

# Around one block, several blocks, and more than the definition reads at once, with a rest.
SIZES = [0, 1, 1023, 1025, 2**18 + 1, 600_003]


@pytest.fixture(scope="module")
def defined():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "core", lambda: None)
        return BlockSums()


@pytest.mark.parametrize("num", SIZES)
def test_the_core_s_checksum_is_the_defined_one(isa, threads, defined, num):
    torch.manual_seed(num)
    words = torch.randint(-(2**31), 2**31, (num + 1,)).to(torch.int32)[1:]
    assert torch.equal(BlockSums().of(words), defined.of(words))


def test_many_tensors_are_read_one_by_one(isa, defined):
    made = torch.randn(50_001)
    tensors = [made[:num] for num in (5, 0, 2**11, 1, 2**11 + 1, 40_000, 7)]
    tensors += [
        made[1:],
        made.bfloat16()[1:],
        made.half()[:9],
        made.double(),
        made.long(),
        made[::2],
        made != 0,
    ]
    tensors += [made[:4].cfloat(), torch.nn.Parameter(made[3:]), made[:50_000].view(250, 200).t()]
    parts = [Part(tensor, turn) for tensor in tensors for turn in (None, 0, 5)]
    assert torch.equal(BlockSums().of_all(parts), defined.of_all(parts))


def test_storages_that_were_emptied_are_not_read_behind_their_end():
    core, tensor = native.core(), torch.randn(100)
    weights = torch.ones(16, dtype=torch.int32)
    rule = (weights.data_ptr(), len(weights))
    assert core.checksums_of(*rule, [tensor], [-1], 64) != [None]
    with pytest.raises(ValueError, match="blocks of at least one word"):
        core.checksums_of(rule[0], 0, [tensor], [-1], 64)
    for turns, run in (([0, 1], 64), ([0], 0), ([], 64)):
        with pytest.raises(ValueError, match="one turn per tensor"):
            core.checksums_of(*rule, [tensor], turns, run)
    tensor.untyped_storage().resize_(0)
    assert core.checksums_of(*rule, [tensor, torch.zeros(3, dtype=torch.uint8)], [-1, 5], 64) == [
        None,
        None,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("start", "stride", "num"), [(0, 1, 0), (3, 7, 8), (0, 1, 17), (99, 50, 1)])
def test_samples_are_strided_elements_times_a_weight(isa, dtype, start, stride, num):
    made, total, last = torch.randn(10, 10).to(dtype), torch.ones(20), torch.zeros(20)
    at = (total.data_ptr(), last.data_ptr())
    assert native.core().sample(made, start, stride, num, 3.0, *at)
    wanted = 3 * made.flatten()[start::stride][:num].float()
    assert torch.equal(last[:num], wanted) and not last[num:].any()
    assert torch.equal(total[:num], 1 + wanted) and (total[num:] == 1).all()
    assert native.core().sample(made, start, stride, num, 1.0, 0, last.data_ptr())


def test_no_sample_is_taken_of_what_the_core_cannot_read():
    last = torch.full((4,), 5.0)
    for made in (torch.randn(4, 4).t(), torch.ones(16).double(), torch.arange(16), torch.randn(15), None):
        assert not native.core().sample(made, 0, 5, 4, 1.0, 0, last.data_ptr())
    for start, stride in ((-1, 1), (0, 0), (13, 1)):
        assert not native.core().sample(torch.randn(16), start, stride, 4, 1.0, 0, last.data_ptr())
    assert (last == 5).all()
