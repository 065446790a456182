"""Reference implementation of every op in plain PyTorch.

This implementation is used in builds without the native core, and on devices other than CPU and CUDA.
Elementwise results equal the core's results bit for bit, except for the bits of a NaN. Sums of squares are
bit-equal on the CPU, where cumsum adds in order. On other devices sums of squares differ by the rounding of a
float64 sum, with a relative error of at most numel · 2^-52. `plan.py` checks the arguments and documents
their dtypes and shapes. The caller owns all memory. Every op makes several passes, and uses float32
temporaries as large as a slot.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

Slots = Sequence[tuple[int, int]]  # (offset, numel) in elements

# Constants for the order in which squares are added; csrc/plan.h defines the order.
_LANES = 16
_SEGMENT = 256
_BLOCK = 8192
_BLOCK_LANES = 256


def _parts(flat: Tensor, slots: Slots) -> Iterator[Tensor]:
    return (flat[offset : offset + numel] for offset, numel in slots)


def _scaled(tensor: Tensor, scale: Tensor) -> Tensor:
    return tensor.detach().view(-1).to(torch.float32) * scale


def _flag(nonfinite: Tensor, slot: int, values: Tensor) -> None:
    nonfinite[slot : slot + 1].bitwise_or_((~torch.isfinite(values)).any().to(torch.uint8))


def _write(target: Tensor, values: Tensor, only_if: Tensor | None) -> None:
    """Write `values` to `target`, with a cast, unless `only_if` is 0, which the host does not read."""
    if only_if is not None:
        values = torch.where(only_if != 0, values.to(target.dtype), target)
    target.copy_(values)


@torch.no_grad()
def pack_(
    slots: Slots,
    flat: Tensor,
    tensors: Iterable[Tensor | None],
    scale: Tensor,
    only_if: Tensor | None = None,
) -> None:
    """Write cast(tensor * scale), or zeros for None, to every slot of `flat`, unless `only_if` is 0."""
    for part, tensor in zip(_parts(flat, slots), tensors, strict=True):
        _write(part, torch.zeros_like(part) if tensor is None else _scaled(tensor, scale), only_if)


@torch.no_grad()
def unpack_(
    slots: Slots,
    tensors: Iterable[Tensor | None],
    flat: Tensor,
    scale: Tensor,
    only_if: Tensor | None = None,
) -> None:
    """Write cast(flat[slot] * scale) to every tensor, unless `only_if` is 0."""
    for part, tensor in zip(_parts(flat, slots), tensors, strict=True):
        if tensor is not None:
            _write(tensor.detach().view(-1), _scaled(part, scale), only_if)


@torch.no_grad()
def accumulate_(
    slots: Slots,
    acc: Tensor,
    grads: Iterable[Tensor | None],
    scale: Tensor,
    *,
    first: bool,
    nonfinite: Tensor,
) -> None:
    """Set acc[slot] to grad * scale if `first`; otherwise add grad * scale to acc[slot]."""
    for slot, (part, grad) in enumerate(zip(_parts(acc, slots), grads, strict=True)):
        if grad is None:
            if first:
                part.zero_()
            continue
        term = _scaled(grad, scale)
        _flag(nonfinite, slot, term)
        if first:
            part.copy_(term)
        else:
            part.add_(term)


@torch.no_grad()
def accumulate_cast_(
    slots: Slots,
    wire: Tensor,
    acc: Tensor,
    grads: Iterable[Tensor | None],
    grad_scale: Tensor,
    wire_scale: Tensor,
    *,
    first: bool,
    nonfinite: Tensor,
) -> None:
    """Set wire[slot] to cast((acc[slot] + grad * grad_scale) * wire_scale), without `acc` if `first`."""
    sums = zip(_parts(wire, slots), _parts(acc, slots), grads, strict=True)
    for slot, (out, part, grad) in enumerate(sums):
        if grad is None:
            total = torch.zeros_like(part) if first else part * wire_scale
        else:
            term = _scaled(grad, grad_scale)
            total = (term if first else part + term) * wire_scale
        out.copy_(total)
        _flag(nonfinite, slot, out)


@torch.no_grad()
def unscale_norm(
    tensors: Iterable[Tensor | None],
    out: Iterable[Tensor | None],
    scale: Tensor,
    *,
    sumsq: Tensor,
    nonfinite: Tensor,
) -> None:
    """Store y = tensor * scale if `out` has a tensor; set sumsq[slot] to Σ y² of the stored y in float64."""
    for slot, (tensor, target) in enumerate(zip(tensors, out, strict=True)):
        if tensor is None:
            sumsq[slot] = 0
            continue
        y = _scaled(tensor, scale)
        if target is not None:
            y = target.detach().view(-1).copy_(y).to(torch.float32)
        sumsq[slot] = _sum_squares(y)
        _flag(nonfinite, slot, sumsq[slot])


def _add_rows(terms: Tensor, num: int) -> Tensor:
    """Add each group of `num` rows in order; missing rows at the end count as zeros."""
    terms = torch.nn.functional.pad(terms, (0, 0, 0, -len(terms) % num))
    return terms.view(-1, num, terms.shape[1]).cumsum(1)[:, -1]


def _add_halves(lanes: Tensor) -> Tensor:
    """Add the second half of each row to the first half, until one lane is left."""
    while lanes.shape[1] > 1:
        width = lanes.shape[1] // 2
        lanes = lanes[:, :width] + lanes[:, width:]
    return lanes[:, 0]


def _sum_squares(y: Tensor) -> Tensor:
    """Sum the squares in the order of the native kernel.

    The order is: lanes within segments, segments within blocks, halves of the lanes, then lanes of blocks.
    """
    if y.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=y.device)
    squares = torch.nn.functional.pad(y, (0, -y.numel() % _SEGMENT)).to(torch.float64).square()
    segments = _add_rows(squares.view(-1, _LANES), _SEGMENT // _LANES)
    blocks = _add_halves(_add_rows(segments, _BLOCK // _SEGMENT))
    block_lanes = torch.nn.functional.pad(blocks, (0, -len(blocks) % _BLOCK_LANES)).view(-1, _BLOCK_LANES)
    return _add_halves(_add_rows(block_lanes, len(block_lanes)))[0]
