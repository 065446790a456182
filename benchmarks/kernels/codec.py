"""Cases that compare `Codec` with torch's casts and sums.

The torch expressions compute the same codes, rounded to nearest, with one scale for each block. For the
residual they need additional passes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.case import Build, Case, Sizes, Slots, check
from pyengine.ops.codec import Codec

BLOCK, RANKS = 256, 4
LARGEST = {"int8": 127.0, "e4m3": 448.0}


class _Operands:
    """A flat buffer, and its payloads from several ranks."""

    def __init__(self, slots: Slots, name: str) -> None:
        self.name, self.codec = name, Codec(name, BLOCK)
        self.numel = slots.numel // BLOCK * BLOCK
        # The largest value of each block is the largest code, so scales are 1 and the contestants agree.
        self.values = (slots.empty(torch.float32)[: self.numel].normal_() * 30).round_().clamp_(-100, 100)
        self.values[::BLOCK] = LARGEST[name]
        num_bytes = self.codec.num_bytes(self.numel)
        self.payloads = torch.empty(RANKS, num_bytes, dtype=torch.uint8, device=slots.device)
        for payload in self.payloads:
            self.codec.encode_(payload, self.values)
        self.out = torch.empty_like(self.payloads[0])
        self.decoded = torch.empty_like(self.values)

    def torch_encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = values.view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / LARGEST[self.name]
        scaled = blocks / scales
        if self.name == "int8":
            return scales, scaled.round().to(torch.int8)
        return scales, scaled.to(torch.float8_e4m3fn)

    def torch_decode(self, payload: Tensor) -> Tensor:
        scales = payload[: self.numel // BLOCK * 4].view(torch.float32)
        codes = payload[self.numel // BLOCK * 4 :]
        codes = codes.view(torch.int8 if self.name == "int8" else torch.float8_e4m3fn)
        return (codes.view(-1, BLOCK).to(torch.float32) * scales.unsqueeze(1)).view(-1)

    def torch_sum(self, payloads: Tensor) -> Tensor:
        first, *others = (self.torch_decode(payload) for payload in payloads)
        for other in others:
            first += other
        return first

    def torch_sum_encode(self) -> tuple[Tensor, Tensor]:
        return self.torch_encode(self.torch_sum(self.payloads))

    def holds(self, payload: Tensor, expected: tuple[Tensor, Tensor]) -> bool:
        scales, codes = (tensor.reshape(-1).view(torch.uint8) for tensor in expected)
        return torch.equal(payload, torch.cat([scales, codes]))


def encode_case(name: str, slots: Slots, form: str, with_residual: bool, seed: int | None) -> Case:
    b = _Operands(slots, form)
    residual = torch.zeros_like(b.values) if with_residual else None

    def torch_run() -> tuple[Tensor, Tensor]:
        if residual is None:
            return b.torch_encode(b.values)
        scales, codes = b.torch_encode(b.values + residual)
        residual.copy_((b.values + residual) - (codes.to(torch.float32) * scales).view(-1))
        return scales, codes

    b.codec.encode_(b.out, b.values)
    check(b.holds(b.out, torch_run()), name)
    run = partial(b.codec.encode_, b.out, b.values, residual=residual, seed=seed)
    more = b.values.nbytes if with_residual else 0
    return Case(name, run, torch_run, b.values.nbytes + more, b.out.nbytes + more, "copy")


def sum_encode_case(name: str, slots: Slots, form: str) -> Case:
    b = _Operands(slots, form)
    run = partial(b.codec.sum_encode_, b.out, b.payloads, b.numel)
    run()
    check(b.holds(b.out, b.torch_sum_encode()), name)
    return Case(name, run, b.torch_sum_encode, b.payloads.nbytes, b.out.nbytes, "copy")


def decode_case(name: str, slots: Slots, form: str, ranks: int) -> Case:
    b = _Operands(slots, form)
    payloads = b.payloads[:ranks]

    run, torch_run = partial(b.codec.sum_, b.decoded, payloads), partial(b.torch_sum, payloads)
    run()
    check(torch.equal(b.decoded, torch_run()), name)
    return Case(name, run, torch_run, payloads.nbytes, b.decoded.nbytes, "copy")


def cases(sizes: Sizes) -> list[Build]:
    few = sizes.few
    return [
        partial(encode_case, "encode int8, block 256", few, "int8", False, None),
        partial(encode_case, "encode int8, residual", few, "int8", True, None),
        partial(encode_case, "encode int8, stochastic", few, "int8", False, 1),
        partial(encode_case, "encode e4m3, block 256", few, "e4m3", False, None),
        partial(sum_encode_case, f"sum of {RANKS} and encode, int8", few, "int8"),
        partial(sum_encode_case, f"sum of {RANKS} and encode, e4m3", few, "e4m3"),
        partial(decode_case, "decode int8", few, "int8", 1),
        partial(decode_case, f"sum of {RANKS}, int8 -> fp32", few, "int8", RANKS),
    ]
