"""The core's checksum is the one that PyTorch's operators define, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from pyengine.audit.checksum import Checksums, words_of
from pyengine.ops import native

CPU = torch.device("cpu")
# One row of weights and its ends, one block and its ends, all shifts of blocks, and a second round of them.
SIZES = [0, 1, 8447, 8448, 8449, 2**15, 2**15 + 1, 100_003, 17 * 2**15 + 5, 40 * 2**15]


@pytest.fixture(scope="module")
def defined():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "core", lambda: None)
        return Checksums(CPU, 0)


@pytest.mark.parametrize("num", SIZES)
def test_the_core_s_checksum_is_the_defined_one(isa, threads, defined, num):
    torch.manual_seed(num)
    words = torch.randint(-(2**31), 2**31, (num + 1,)).to(torch.int32)[1:]
    assert torch.equal(Checksums(CPU, num).of(words), defined.of(words))


def test_extremes_wrap_alike(isa, defined):
    for value in (-(2**31), 2**31 - 1):
        words = torch.full((70_000,), value, dtype=torch.int32)
        assert torch.equal(Checksums(CPU, 0).of(words), defined.of(words))


def test_many_tensors_are_read_one_by_one(isa, defined):
    tensors = [words_of(torch.randn(num)) for num in (5, 0, 2**11, 1, 2**11 + 1, 40_000, 7)]
    assert torch.equal(Checksums(CPU, 0).of_all(tensors), defined.of_all(tensors))
