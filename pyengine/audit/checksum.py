"""Checksums of a tensor's bits and their positions, computed in one read without a host synchronization.

Equal bits in equal positions give equal checksums in any order of summation, because integer arithmetic
wraps. A change of a single word, such as a flipped sign or bit, is always detected. Swapped words are
detected unless two weights happen to cancel, with a probability of 2^-31. `of` takes words (int32 `[n]`, see
`words_of`), and returns their checksum as a 0-dim int64 tensor on the device. `of_all` returns many checksums
as an int64 tensor of shape `[n]`. The host does not read the checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyengine.gradients.slots import local
from pyengine.ops import native
from pyengine.ops.device import HOST, runs_ahead

# On the host, words are weighted block by block, so that the weights of a block stay in the L1 cache.
_BLOCK = 2**10
_BLOCKS_AT_ONCE = 2**8  # Number of blocks per step without the native core.
# An accelerator is fastest with few, long blocks.
_MIN_LANES, _MAX_LANES = 2**15, 2**22
_ELEMENTS_A_LANE = 2**10  # Elements per lane; the sums of the lanes then need little memory.
# Tensors of at most `_SHORT` words are summed in one call, because separate calls would cost more time.
_SHORT = 2**11
# Consecutive blocks are added at different offsets, so that elements one block apart are in different lanes.
_NUM_SHIFTS, _SHIFT = 16, 64
# Lanes are weighted in `_NUM_ROWS` rows, which share their weights except for a factor per row.
_NUM_ROWS = 4
_RUN = 64
# Odd constants without a regular bit pattern, from splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_GOLDEN, _MIX = -7046029254386353131, -4658895280553007687


class Part(NamedTuple):
    """The part of a tensor to read: the whole tensor, or 64 words at a position that depends on `turn`."""

    tensor: Tensor
    turn: int | None = None

    def words(self) -> Tensor:
        """Return the words to read; see `words_of`."""
        words = words_of(self.tensor)
        room = words.numel() - _RUN
        if self.turn is None or room <= 0:
            return words
        start = self.turn * 40503 % (room + 1)
        return words[start : start + _RUN]


def checksums_on(device: torch.device, numel: int) -> BlockSums | LaneSums:
    """Return the checksum implementation for tensors on `device`, with `numel` elements in total."""
    return LaneSums(device, numel) if runs_ahead(device) else BlockSums()


class BlockSums:
    """A 64-bit sum of words multiplied by odd weights, with a separate odd factor for every block of words.

    The native core computes the same sum; the PyTorch operators below define it.

    Cost: `of` reads 4 bytes per word. The weights take 4 KB.
    """

    def __init__(self) -> None:
        self._weights = _odd_weights(_BLOCK)
        self._core = native.core()
        native.can_gather()  # prepares the core for reading tensor objects

    def of(self, words: Tensor) -> Tensor:
        if self._core is not None:
            assert words.is_contiguous()
            number = self._core.checksum(self._weights.data_ptr(), _BLOCK, words.data_ptr(), words.numel())
            return torch.tensor(number, dtype=torch.int64, device=HOST)
        total = torch.zeros((), dtype=torch.int64, device=HOST)
        num_words = _BLOCKS_AT_ONCE * _BLOCK
        for start in range(0, words.numel(), num_words):
            part = words[start : start + num_words].to(torch.int64)
            blocks = torch.nn.functional.pad(part, (0, -part.numel() % _BLOCK)).view(-1, _BLOCK)
            first = start // _BLOCK
            places = torch.arange(first, first + len(blocks), dtype=torch.int64, device=HOST)
            total += ((blocks * self._weights).sum(1) * (_mixed(places) | 1)).sum()
        return total

    def of_all(self, parts: Sequence[Part]) -> Tensor:
        found: list[int | None] = [None] * len(parts)
        if self._core is not None:  # contiguous words need a single call
            turns = [-1 if part.turn is None else part.turn for part in parts]
            tensors = [part.tensor for part in parts]
            found = self._core.checksums_of(self._weights.data_ptr(), _BLOCK, tensors, turns, _RUN)
        numbers = [
            int(self.of(part.words())) if each is None else each
            for part, each in zip(parts, found, strict=True)
        ]
        return torch.tensor(numbers, dtype=torch.int64, device=HOST)


class LaneSums:
    """A checksum in two stages: a 32-bit sum of words per lane, and a 64-bit sum over the lanes.

    In both stages the terms are multiplied by odd numbers. This scheme needs few kernel launches, no memory
    per word, and no 64-bit product per word. `numel` is the number of elements in all tensors to read, and
    determines the length of a block.

    Cost: `of` reads 4 bytes per word. The lanes take 5 bytes each: 170 KB in total, or at most 1/64 byte per
    element if there are 11 M elements or more.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        wanted = max(_MIN_LANES, min(_MAX_LANES, numel // _ELEMENTS_A_LANE))
        self._lanes = 1 << wanted.bit_length() - 1
        size = self._lanes + _NUM_SHIFTS * _SHIFT
        self._weights = _odd_weights(size // _NUM_ROWS).to(device)
        self._row_weights = 2 * torch.arange(_NUM_ROWS, dtype=torch.int64, device=device) + 1
        self._sums = torch.zeros(size, dtype=torch.int32, device=device)
        self._places = [
            self._sums[start : start + self._lanes] for start in range(0, _NUM_SHIFTS * _SHIFT, _SHIFT)
        ]

    def of_all(self, parts: Sequence[Part]) -> Tensor:
        # Short parts are summed together.
        tensors = [part.words() for part in parts]
        found = torch.zeros(len(tensors), dtype=torch.int64, device=self._sums.device)
        short = [index for index, words in enumerate(tensors) if words.numel() <= _SHORT]
        if short:
            lengths = torch.tensor(
                [tensors[index].numel() for index in short], dtype=torch.int64, device=HOST
            )
            ends = lengths.cumsum(0)
            starts = ends - lengths
            places = torch.arange(int(ends[-1]), dtype=torch.int64, device=HOST)
            places -= starts.repeat_interleave(lengths)
            words = torch.cat([tensors[index] for index in short]).to(torch.int64)
            # The running sums may wrap, but their differences are still correct.
            so_far = torch.zeros(len(words) + 1, dtype=torch.int64, device=words.device)
            torch.cumsum(words * self._weights[places.to(words.device)], 0, out=so_far[1:])
            sums = so_far[ends.to(words.device)] - so_far[starts.to(words.device)]
            found[torch.tensor(short, dtype=torch.int64, device=words.device)] = sums
        for index, words in enumerate(tensors):
            if words.numel() > _SHORT:
                found[index] = self.of(words)
        return found

    def of(self, words: Tensor) -> Tensor:
        num = words.numel()
        if num <= len(self._weights):
            return (words.to(torch.int64) * self._weights[:num]).sum()
        self._sums.zero_()
        for index, block in enumerate(words.split(self._lanes)):
            place = self._places[index % _NUM_SHIFTS][: block.numel()]
            place.add_(block, alpha=2 * index + 1)  # the factors are odd, so wrapping loses no bit
        rows = self._sums.view(_NUM_ROWS, -1).to(torch.int64) * self._weights
        return (rows.sum(1) * self._row_weights).sum()


def words_of(tensor: Tensor) -> Tensor:
    """Return the bits of this rank's part of a tensor: int32 `[n]`, in the order of the elements.

    The result is a view if the elements are in this order in memory and fill whole words, otherwise a copy.
    """
    flat = local(tensor)
    if flat.layout is not torch.strided:
        flat = flat.to_dense()
    flat = flat.int_repr() if flat.is_quantized else flat  # quantized memory has no other view
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.resolve_neg().contiguous()
    # A contiguous tensor with one element may have any stride.
    flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())
    size = flat.element_size()
    if size >= 4:
        return flat.view(torch.int32)
    raw = flat.view(torch.int16 if size == 2 else torch.uint8)
    missing = -raw.numel() % (4 // size)
    if missing or raw.storage_offset() * size % 4:
        raw = torch.cat([raw, raw.new_zeros(missing)])
    return raw.view(torch.int32)


def pieces(checksums: Tensor) -> Tensor:
    """Split checksums (int64 `[n]`) into `[n, 4]` numbers that float64 can sum exactly over ranks.

    A row contains two 20-bit integers, each followed by its square. On W ranks (at most 8192), an integer
    is equal on all ranks if and only if W times the sum of its squares is the square of its sum.
    """
    mixed = _mixed(checksums)
    parts = torch.stack([mixed & _MASK, mixed >> 20 & _MASK], 1).double()
    return torch.stack([parts, parts * parts], 2).flatten(1)


def differ(summed: Tensor, world_size: int) -> Tensor:
    """Return which checksums differ (bool `[n]`), given sums of `pieces` over ranks (float64 `[n, 4]`)."""
    totals, squares = summed[:, 0::2], summed[:, 1::2]
    return (world_size * squares != totals * totals).any(1)


_MASK = 2**20 - 1


def _odd_weights(num: int) -> Tensor:
    return (_mixed(torch.arange(1, num + 1, dtype=torch.int64, device=HOST)) | 1).to(torch.int32)


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ (value >> 30 & 2**34 - 1)) * _MIX + _GOLDEN
    return value ^ (value >> 27 & 2**37 - 1)
