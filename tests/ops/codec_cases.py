"""Values for codecs, and a comparison of everything that a codec writes with plain PyTorch."""

from functools import partial

import torch

from pyengine.ops import codec as codec_module

INF, NAN = float("inf"), float("nan")
_LARGEST = torch.finfo(torch.float32).max
_SPECIAL = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 2.0**-149, _LARGEST, -3.39615e38, 65_519.0, 65_520.0])


def draw(numel, seed=0, binades=20):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-binades, 10, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), exponents)


def check_equals_plain_pytorch(codec, numel, seed, device, monkeypatch, shift=0):
    """Compare what the codec writes on a device with what it writes without kernels."""
    got = _results(codec, numel, shift, seed, device)
    monkeypatch.setattr(codec_module, "_runner", lambda device: None)
    for one, other in zip(got, _results(codec, numel, shift, seed, torch.device("cpu")), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _results(codec, numel, shift, seed, device):
    """Return everything that the codec writes; float32 tensors begin `shift` elements later."""
    values = draw(numel + shift, binades=140)
    if numel > 30:
        values[-10:] = _SPECIAL
    values = values.to(device)[shift:]
    payloads = torch.zeros(3, codec.num_bytes(numel), dtype=torch.uint8, device=device)
    for rank, payload in enumerate(payloads):
        codec.encode_(payload, values * 2.0**-rank, seed=seed, offset=5)
    found = [payloads]
    for with_residual in (False, True):
        for method, source in ((codec.encode_, values), (partial(codec.sum_encode_, numel=numel), payloads)):
            memory = _margin(codec.num_bytes(numel), torch.uint8).to(device)
            residual = _margin(numel + shift).normal_(generator=torch.Generator().manual_seed(1)).to(device)
            options = {"residual": residual[3 + shift :]} if with_residual else {}
            method(memory[:-3], source, seed=seed, offset=2**32 - 3, **options)
            found += [memory, residual]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = _margin(numel + shift, dtype).to(device)
        codec.sum_(out[shift : shift + numel], payloads)
        found.append(out)
    return [tensor.cpu() for tensor in found]


def _margin(numel, dtype=torch.float32):
    """Return memory with three extra elements, which the codec must not write."""
    return torch.full((numel + 3,), 7, dtype=dtype)
