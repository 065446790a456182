"""A checksum depends on the bits of a tensor and on their positions, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyengine.audit.checksum import BlockSums, LaneSums, Part, differ, pieces, words_of

CPU = torch.device("cpu")
# Less than a block, around a block, several blocks with a rest; some sizes do not fill a whole word.
SIZES = [0, 1, 7, 1025, 2**15 + 1, 100_001]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.fixture(params=["host", "accelerator"])
def of(request):
    def checksum(tensor: Tensor) -> int:
        sums = BlockSums() if request.param == "host" else LaneSums(CPU, tensor.numel())
        return int(sums.of(words_of(tensor)))

    return checksum


def _made(num: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(num)
    return (torch.randn(num) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num", SIZES)
def test_equal_bits_have_equal_checksums_at_any_address_and_stride(of, num, dtype):
    tensor = _made(num, dtype)
    unaligned = torch.cat([tensor[:1], tensor])[1:] if num else tensor.clone()
    strided = torch.stack([tensor, tensor], 1)[:, 0]
    assert of(tensor) == of(unaligned) == of(strided) == of(tensor.clone())


@pytest.mark.parametrize("num", SIZES[1:])
def test_one_bit_is_seen_wherever_it_flips(of, num):
    tensor = _made(num, torch.float32)
    whole = of(tensor)
    for place in {0, num // 2, num - 1}:
        for bit in (0, 13, 30, 31):
            flipped = tensor.clone()
            flipped.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            assert of(flipped) != whole


@pytest.mark.parametrize("distance", [1, 1024, 2**15 - 64, 2**15])
def test_a_swap_is_seen_at_any_distance(of, distance):
    tensor = _made(4 * 2**15, torch.float32)
    whole = of(tensor)
    for place in range(0, tensor.numel() - distance, 4111):
        swapped = tensor.clone()
        swapped[[place, place + distance]] = tensor[[place + distance, place]]
        assert of(swapped) != whole


@pytest.mark.parametrize("pair", [(0, 1), (5, 2**15 + 5), (7, 33500)])
def test_two_signs_are_seen(of, pair):
    tensor = _made(100_001, torch.float32)
    turned = tensor.clone()
    turned[list(pair)] *= -1
    assert of(turned) != of(tensor)


def test_zeros_of_other_signs_nans_and_lengths_are_told_apart_by_their_bits(of):
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    assert of(torch.tensor([torch.nan])) == of(torch.tensor([torch.nan]))
    assert of(torch.ones(3)) != of(torch.ones(4))


@pytest.mark.parametrize("world", [1, 2, 3, 8192])
def test_sums_over_ranks_show_whether_all_checksums_are_equal(world):
    checksums = torch.tensor([-(2**62), 12345, 7])
    alike = pieces(checksums) * world
    assert differ(alike, world).tolist() == [False] * 3
    other = alike - pieces(checksums) + pieces(checksums + torch.tensor([0, 1, 0]))
    assert differ(other, world).tolist() == [False, world > 1, False]


def test_a_run_moves_through_all_of_a_tensor():
    words = torch.arange(1000, dtype=torch.int32)
    runs = [Part(words, turn).words() for turn in range(300)]
    assert {run.numel() for run in runs} == {64}
    assert torch.cat(runs).unique().numel() > 990
    assert Part(words[:60], 3).words().numel() == 60 and Part(words).words().numel() == 1000


@pytest.mark.parametrize("checksums", [BlockSums(), LaneSums(CPU, 0)], ids=["host", "accelerator"])
def test_many_tensors_at_once_have_the_checksums_that_they_have_alone(checksums):
    parts = [Part(_made(num, torch.float32)) for num in (5, 0, 2**11, 1, 2**11 + 1, 40_000, 7)]
    alone = torch.stack([checksums.of(part.words()) for part in parts])
    assert torch.equal(checksums.of_all(parts), alone)
