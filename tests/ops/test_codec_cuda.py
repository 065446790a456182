"""The codec's CUDA kernels: equal bit for bit to plain PyTorch, on the emulator and, where there is one,
on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from emulated_cuda import FORWARD, REVERSED, SHUFFLED

from pyengine.ops import codec as codec_module
from pyengine.ops.codec import Codec

SCALED = ("int8", "e4m3", "e5m2")
CODECS = [*(Codec(name, 2**power) for name in SCALED for power in range(5, 11)), Codec("bf16"), Codec("fp16")]
# More than a block and a warp's blocks, at an odd address; more than a CTA's. Then seeds.
CASES = [(codec, *case) for codec in CODECS for case in [(1025, 1, None), (9001, 0, 3)]]
CASES += [(codec, numel, 0, 3) for codec in (Codec("int8", 32), Codec("fp16")) for numel in (1, 31)]


class EmulatedFunctions:
    """What `codec.py` calls on a CUDA device, on the CPU."""

    def __init__(self, kernels):
        self._kernels = kernels

    def codec_encode(self, codec, *arguments):
        self._kernels.codec_encode_cuda(0, self._of(codec), *arguments)

    def codec_sum_encode(self, codec, *arguments):
        self._kernels.codec_sum_encode_cuda(0, self._of(codec), *arguments)

    def codec_sum(self, codec, *arguments):
        self._kernels.codec_sum_cuda(0, self._of(codec), *arguments)

    def _of(self, layout):
        return self._kernels.Codec(layout.format.code, layout.block, layout.numel)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Return where the kernels run; on the CPU they do from here on."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        return torch.device("cuda", torch.cuda.current_device())
    _emulate(request.getfixturevalue("kernels"), monkeypatch)
    return torch.device("cpu")


def _emulate(kernels, monkeypatch):
    monkeypatch.setattr(codec_module, "_runner", lambda device: EmulatedFunctions(kernels))
    monkeypatch.setattr(codec_module, "_native", lambda layout: layout)


def _values(numel, seed, shift=0):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 8, (numel + shift,), generator=generator)
    values = torch.ldexp(torch.randn(numel + shift, generator=generator), exponents)
    if numel > 30:
        values[shift + numel // 2], values[-1], values[shift] = float("inf"), float("nan"), -float("inf")
    return values


def _margin(numel, dtype=torch.float32):
    """Memory with three elements more, which nobody may touch."""
    return torch.full((numel + 3,), 7, dtype=dtype)


def _results(codec, numel, shift, seed, device):
    """Return all that the codec's methods write; addresses of float32 are moved by `shift` elements."""
    values = _values(numel, 0, shift).to(device)[shift:]
    payloads = torch.zeros(3, codec.num_bytes(numel), dtype=torch.uint8, device=device)
    found = [payloads]
    for rank, payload in enumerate(payloads):
        codec.encode_(payload, _values(numel, rank, shift).to(device)[shift:], seed=seed, offset=5)
    for with_residual in (False, True):
        for method, source in ((codec.encode_, values), (codec.sum_encode_, payloads)):
            memory = _margin(codec.num_bytes(numel), torch.uint8).to(device)
            residual = (
                2.0**-8 * _margin(numel + shift).normal_(generator=torch.Generator().manual_seed(1))
            ).to(device)
            options = {"residual": residual[3 + shift :]} if with_residual else {}
            method(memory[:-3], source, seed=seed, offset=2**32 - 3, **options)
            found += [memory, residual]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = _margin(numel + shift, dtype).to(device)
        codec.sum_(out[shift : shift + numel], payloads)
        found.append(out)
    return [tensor.cpu() for tensor in found]


def _check(codec, numel, shift, seed, device, monkeypatch):
    got = _results(codec, numel, shift, seed, device)
    monkeypatch.setattr(codec_module, "_runner", lambda device: None)
    for one, other in zip(got, _results(codec, numel, shift, seed, torch.device("cpu")), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("codec", "numel", "shift", "seed"), CASES, ids=str)
def test_kernels_equal_plain_pytorch(device, monkeypatch, codec, numel, shift, seed):
    _check(codec, numel, shift, seed, device, monkeypatch)


@pytest.mark.parametrize("order", [REVERSED, SHUFFLED])
@pytest.mark.parametrize("codec", [Codec("int8", 64), Codec("e4m3", 512)], ids=["64", "512"])
def test_the_order_of_blocks_and_threads_does_not_matter(kernels, monkeypatch, codec, order):
    _emulate(kernels, monkeypatch)
    kernels.set_order(order)
    try:
        _check(codec, 9001, 0, 3, torch.device("cpu"), monkeypatch)
    finally:
        kernels.set_order(FORWARD)
