"""Reference implementation of `ExactSum` in plain PyTorch. csrc/exact.h has the rules and their proofs.

This implementation produces the same bits as the native core. Builds without the core, and devices other than
CPU and CUDA, use this implementation. `exact.py` has checked the arguments.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from pyengine.ops.reference import Slots

BLOCK = 64  # Number of elements that share a bin.
POISONED = 255  # Bin of a block in which a term had an inf, a NaN or a magnitude of 2^126 or more.
_POISON_EXPONENT = 253


@torch.no_grad()
def deposit_(
    slots: Slots,
    limbs: tuple[Tensor, Tensor, Tensor],
    tensors: Iterable[Tensor | None],
    width: int,
    *,
    first: bool,
    nonfinite: Tensor,
) -> None:
    """Add the tensor of every slot to the sum, or overwrite the sum with the tensors.

    Here and in the ops below, `limbs` is the tuple (hi, lo, bins): hi and lo are int32 `[numel]`, and bins is
    uint8 `[numel / 64]`. One term uses `width` bits of a limb (integer). `nonfinite` is OR-ed with 1 for each
    slot in which the term makes a block invalid.
    """
    for slot, ((offset, numel), tensor) in enumerate(zip(slots, tensors, strict=True)):
        blocks = slice(offset // BLOCK, -(-(offset + numel) // BLOCK))
        mine = [limb.view(-1, BLOCK)[blocks] for limb in limbs[:2]] + [limbs[2][blocks]]
        if first:
            for part in mine:
                part.zero_()
        if tensor is not None and numel > 0:
            flat = tensor.detach().view(-1).to(torch.float32)
            term = torch.nn.functional.pad(flat, (0, -numel % BLOCK)).view(-1, BLOCK)
            found = _bins(term, width)
            _add(mine, term, found, width)
            nonfinite[slot : slot + 1].bitwise_or_((found == POISONED).any().to(torch.uint8))


@torch.no_grad()
def align_(limbs: tuple[Tensor, Tensor, Tensor], bins: Tensor) -> None:
    """Shift limbs to larger bins.

    `bins` is uint8 `[numel / 64]`. A shift by one bin moves the bits of hi to lo; a larger shift leaves
    zeros.
    """
    hi, lo = (limb.view(-1, BLOCK) for limb in limbs[:2])
    _raise_bins((hi, lo, limbs[2]), bins.to(torch.int32))


@torch.no_grad()
def round_(limbs: tuple[Tensor, Tensor, Tensor], out: Tensor, width: int) -> None:
    """Round hi · 2^width + lo, in units of lo, and write it to `out`.

    Empty blocks become 0, and invalid blocks become NaN. A float32 `out` may share the memory of hi.
    """
    hi, lo = (limb.view(-1, BLOCK).to(torch.int64) for limb in limbs[:2])
    bins = limbs[2].to(torch.int32).unsqueeze(1)
    rounded = _to_float(hi * 2**width + lo, is_last=out.dtype == torch.float32)
    unit = _power_of_two(torch.where(_has_grid(bins), (bins - 2) * width - 125, 0))
    unit = torch.where(bins == 0, 0.0, torch.where(bins == POISONED, float("nan"), unit))
    out[: hi.numel()].copy_((rounded * unit).view(-1))


def _bins(term: Tensor, width: int) -> Tensor:
    exponent = (term.view(torch.int32) & 0x7FFFFFFF).amax(1) >> 23
    bins = ((exponent + width - 1) // width).clamp(min=2)
    bins = torch.where(exponent == 0, 0, bins)
    return torch.where(exponent >= _POISON_EXPONENT, POISONED, bins)


def _has_grid(bins: Tensor) -> Tensor:
    return (bins != 0) & (bins != POISONED)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly; torch's functions round the power on some devices."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _raise_bins(limbs: Iterable[Tensor], found: Tensor) -> None:
    hi, lo, bins = limbs
    shift = (found - bins.to(torch.int32)).unsqueeze(1)
    lo.copy_(torch.where(shift == 1, hi, torch.where(shift > 1, 0, lo)))
    hi.masked_fill_(shift > 0, 0)
    bins.copy_(torch.maximum(found, bins.to(torch.int32)))


def _add(limbs: Iterable[Tensor], term: Tensor, found: Tensor, width: int) -> None:
    hi, lo, bins = limbs
    _raise_bins(limbs, found)
    bins = bins.to(torch.int32).unsqueeze(1)
    has_grid = _has_grid(bins)  # a block without a grid stays zero
    to_hi = _power_of_two(torch.where(has_grid, 125 - (bins - 1) * width, 0))
    y = torch.where(has_grid, term, 0.0) * to_hi
    high = y.round()  # `round` rounds ties to even
    hi.add_(high.to(torch.int32))
    lo.add_(((y - high) * 2.0**width).round().to(torch.int32))


def _to_float(total: Tensor, *, is_last: bool) -> Tensor:
    """Round integers of up to 62 bits to float32.

    The result is rounded to nearest, or to odd if another rounding follows. Some devices convert int64 to
    float64 first, so the last ten bits of large totals are merged into one bit. The result stays correct,
    because rounding to 26 bits or fewer depends only on whether any of these bits is set.
    """
    sticky = (total & -1024) | torch.where(total & 1023 != 0, 512, 0)
    exact = torch.where(total.abs() > 2**45, sticky, total).to(torch.float64)
    if is_last:
        return exact.to(torch.float32)
    bits = exact.view(torch.int64)
    cut = 2**29 - 1  # mask of the bits that float32 does not have
    odd = (bits & ~cut) | torch.where(bits & cut != 0, 2**29, 0)
    return odd.view(torch.float64).to(torch.float32)
