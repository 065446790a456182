"""Any call of an op either raises a Python error and writes nothing, or equals plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from draw import Draw
from memory import DTYPES, Memory
from torch import Tensor

from pyengine.ops import native
from pyengine.ops.codec import Codec
from pyengine.ops.codec_reference import FORMATS
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

# Sizes around lanes, segments, blocks and chunks; small sizes first.
NUMELS = (1, 0, 2, 3, 15, 16, 17, 64, 65, 99, 255, 257, 8191, 8193, 16384, 16385, 40001)
BLOCK = 64

Calls = list[Callable[[], None]]


@dataclass
class Outcome:
    """The outcome of a call.

    Attributes:
        error: the type of the error that the call raised; None if it raised none.
        memory: the content of all memory after the call.
        is_written: whether the call changed any memory.
    """

    error: type[Exception] | None
    memory: list[Tensor]
    is_written: bool


def run(data: bytes) -> None:
    """Run one case with the core and without it, and compare."""
    torch.set_num_threads(1 + (data[0] if data else 0) % 3)
    there = _outcome(data)
    with mock.patch.object(native, "core", lambda: None), mock.patch.object(native, "can_gather", bool):
        reference = _outcome(data)
    if there.error is not None:
        assert not there.is_written, f"{there.error.__name__}, and something was written"
    assert there.error == reference.error, f"{there.error} with the core, {reference.error} without it"
    for one, other in zip(there.memory, reference.memory, strict=True):
        _assert_same(one, other)


def _outcome(data: bytes) -> Outcome:
    draw = Draw(data[1:])
    memory = Memory(draw)
    error: type[Exception] | None = None
    before = memory.content()
    try:
        op = draw.pick(OPS)
        calls = op(draw, memory, _plan(draw, is_exact=op is _exact))
        for call in calls:
            before = memory.content()
            call()
    except (ValueError, TypeError) as raised:
        error = type(raised)
    after = memory.content()
    return Outcome(error, after, not all(map(_is_same, before, after)))


def _plan(draw: Draw, *, is_exact: bool) -> BucketPlan:
    numels = [draw.pick(NUMELS) for _ in range(1 + draw.below(5))]
    offsets, end = [], 0
    for numel in numels:
        end += draw.pick((0, 0, 1, 3))
        if is_exact:
            end = -(-end // BLOCK) * BLOCK
        offsets.append(end)
        end += numel
    if draw.once_in(12):
        wrong = draw.pick((offsets, numels))
        wrong[draw.below(len(wrong))] = draw.pick((draw.large(), draw.below(300), -1))
    if draw.once_in(64):
        offsets.pop()
    # A slot of 2^40 elements is allowed, but the core's list of its chunks, 24 bytes each, takes gigabytes.
    if any(2**26 < numel <= 2**40 for numel in numels):
        raise ValueError("too large for this machine")
    return BucketPlan(offsets, numels)


def _tensors(draw: Draw, memory: Memory, plan: BucketPlan) -> Any:
    """Draw a list of tensors for the slots, or pointers to the list; a tensor may have moved afterwards."""
    dtypes = (draw.pick(DTYPES),)
    tensors: Any = [None if draw.once_in(8) else memory.tensor(n, dtypes) for n in plan.numels]
    if draw.once_in(32):
        tensors = [*tensors, None] if draw.once_in(2) else tensors[1:]
    if draw.once_in(32):
        return draw.pick((tuple(tensors), None, 3, iter(tensors), "ab"))
    if not draw.once_in(4):
        return tensors
    pointers = plan.pointers(tensors)
    moved = draw.pick(tensors)
    if draw.once_in(2) and isinstance(moved, Tensor) and type(moved) is Tensor:
        draw.pick(MOVES)(draw, moved)
    return pointers


def _set_data(draw: Draw, tensor: Tensor) -> None:
    if tensor.layout is torch.strided and not tensor.is_meta:  # torch refuses other kinds
        tensor.data = torch.ones(draw.pick((tensor.numel(), 1)), dtype=tensor.dtype)


def _resize(draw: Draw, tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.resizable():
        held = storage.nbytes()
        storage.resize_(0)
        storage.resize_(draw.below(2 * held + 64))
        storage.fill_(0)


def _shrink(draw: Draw, tensor: Tensor) -> None:
    if not tensor.requires_grad:  # torch refuses to resize such tensors
        tensor.resize_(draw.below(tensor.numel() + 1))


MOVES = (_set_data, _resize, _shrink)


def _flags(draw: Draw, memory: Memory, plan: BucketPlan) -> Tensor:
    if draw.once_in(32):
        return memory.tensor(len(plan.numels), (torch.uint8, torch.float32))
    return memory.new(len(plan.numels), torch.uint8).zero_()


def _pack(draw: Draw, memory: Memory, plan: BucketPlan) -> Calls:
    flat, scale = memory.flat(plan.flat_numel, DTYPES), memory.scale()
    tensors = _tensors(draw, memory, plan)
    return [lambda: plan.pack_(flat, tensors, scale)]


def _unpack(draw: Draw, memory: Memory, plan: BucketPlan) -> Calls:
    flat, scale = memory.flat(plan.flat_numel, DTYPES), memory.scale()
    tensors = _tensors(draw, memory, plan)
    return [lambda: plan.unpack_(tensors, flat, scale)]


def _accumulate(draw: Draw, memory: Memory, plan: BucketPlan) -> Calls:
    acc, scale, first = memory.flat(plan.flat_numel, DTYPES[:1]), memory.scale(), draw.once_in(2)
    grads, nonfinite = _tensors(draw, memory, plan), _flags(draw, memory, plan)
    return [lambda: plan.accumulate_(acc, grads, scale, first=first, nonfinite=nonfinite)]


def _accumulate_cast(draw: Draw, memory: Memory, plan: BucketPlan) -> Calls:
    acc = memory.flat(plan.flat_numel, DTYPES[:1])
    wire = acc if draw.once_in(4) else memory.flat(plan.flat_numel, DTYPES)
    scales, first = (memory.scale(), memory.scale()), draw.once_in(2)
    grads, nonfinite = _tensors(draw, memory, plan), _flags(draw, memory, plan)
    return [lambda: plan.accumulate_cast_(wire, acc, grads, *scales, first=first, nonfinite=nonfinite)]


def _unscale_norm(draw: Draw, memory: Memory, plan: BucketPlan) -> Calls:
    tensors, scale = _tensors(draw, memory, plan), memory.scale()
    out = draw.pick((None, tensors, ()))
    out = _tensors(draw, memory, plan) if out == () else out
    sumsq = memory.tensor(len(plan.numels), (torch.float64,))
    nonfinite = _flags(draw, memory, plan)
    return [lambda: plan.unscale_norm(tensors, out, scale, sumsq=sumsq, nonfinite=nonfinite)]


def _exact(draw: Draw, memory: Memory, plan: BucketPlan) -> Calls:
    """Draw all calls of an exact sum, whose memory is compared with the rest."""
    terms = draw.pick((2, 1, 3, 4096, 0, 4097))
    if plan.flat_numel > 2**26:
        raise ValueError("too large for this machine")
    numel = -(-plan.flat_numel // BLOCK) * BLOCK + draw.pick((0, 0, BLOCK, 1))
    sums = [ExactSum(plan, numel=numel, terms=terms, device=torch.device("cpu")) for _ in range(2)]
    for each in sums:
        memory.pieces += [each.limbs, each.bins]
    deposits = [_tensors(draw, memory, plan) for _ in range(min(terms, 1 + draw.below(3)))]
    nonfinite, larger = _flags(draw, memory, plan), draw.pick((0, 1, 9, 255))
    out = sums[0].hi.view(torch.float32) if draw.once_in(3) else memory.flat(numel, DTYPES)

    return [
        *(
            partial(sums[index % 2].deposit_, tensors, first=index < 2, nonfinite=nonfinite)
            for index, tensors in enumerate(deposits)
        ),
        lambda: sums[0].align_(sums[0].bins.clamp(min=larger)),
        lambda: sums[0].merge_(sums[1]),
        lambda: sums[0].round_(out),
    ]


def _codec(draw: Draw, memory: Memory, plan: BucketPlan) -> Calls:
    """Draw the calls of a codec; payloads may contain any bytes."""
    del plan
    form = draw.pick(tuple(FORMATS))
    codec = Codec(form, draw.pick((1, 1, 32) if form in ("bf16", "fp16") else (32, 256, 64, 1024, 1)))
    numel, world = draw.pick(NUMELS), 1 + draw.below(3)
    size = codec.num_bytes(numel)
    values = memory.tensor(numel, DTYPES[:1])
    # A narrow dtype does not share memory with another tensor: torch may choose any bits for its nan.
    out = memory.new(numel, draw.pick(DTYPES)) if draw.once_in(3) else memory.tensor(numel, DTYPES[:1])
    payload = memory.tensor(size, (torch.uint8,))
    sent = memory.tensor(world * size, (torch.uint8,))
    if isinstance(sent, Tensor) and sent.layout is torch.strided and sent.numel() == world * size:
        sent = sent.reshape(world, size)
    residual = None if draw.once_in(2) else memory.tensor(numel, DTYPES[:1])
    seed = draw.pick((None, None, 0, -1, 2**63 - 1, 2**63, True))
    offset = draw.pick((0, 0, 1, 64, 2**32 - 1, 2**40, -1, 2**64))
    rounding = {"residual": residual, "seed": seed, "offset": offset}
    return [
        lambda: codec.encode_(payload, values, **rounding),
        lambda: codec.sum_encode_(payload, sent, numel, **rounding),
        lambda: codec.sum_(out, sent),
        lambda: codec.decode_(out, payload),
    ]


OPS = (_pack, _unpack, _accumulate, _accumulate_cast, _unscale_norm, _exact, _codec)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two copies of a piece have the same bits, apart from the payloads of NaNs."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.reshape(-1), other.reshape(-1)
    nan = one.isnan()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    ours, theirs = one.view(whole), other.view(whole)
    same = nan | (ours == theirs) | _differ_in_narrow_nans(ours, theirs)
    return torch.equal(nan, other.isnan()) and bool(same.all())


def _differ_in_narrow_nans(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return which elements differ only in 16-bit NaNs, written through a view in another dtype."""
    if ours.element_size() < 4:
        return torch.zeros_like(ours, dtype=torch.bool)
    one, other = (each.view(torch.int16).view(-1, ours.element_size() // 2) for each in (ours, theirs))
    same = one == other
    for dtype in (torch.bfloat16, torch.float16):
        same |= one.view(dtype).isnan() & other.view(dtype).isnan()
    return same.all(1)


def _assert_same(one: Tensor, other: Tensor) -> None:
    assert _is_same(one, other), f"{one} with the core, {other} without it"
