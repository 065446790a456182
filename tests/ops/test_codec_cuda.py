"""The codec's CUDA kernels equal plain PyTorch bit for bit, on the emulator and on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch
from codec_cases import check_equals_plain_pytorch

from pyengine.ops import codec as codec_module
from pyengine.ops.codec import Codec

SCALED = ("int8", "e4m3", "e5m2")
CODECS = [*(Codec(name, 2**power) for name in SCALED for power in range(5, 11)), Codec("bf16"), Codec("fp16")]
# (codec, numel, shift, seed): more elements than a warp's blocks, at an odd address; more than a CTA's.
CASES = [(codec, *case) for codec in CODECS for case in [(1025, 1, None), (9001, 0, 3)]]
CASES += [(codec, numel, 0, 3) for codec in (Codec("int8", 32), Codec("fp16")) for numel in (1, 31)]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Return the device of the kernels; on the CPU, the emulator runs them from now on."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        return torch.device("cuda", torch.cuda.current_device())
    _emulate(request.getfixturevalue("kernels"), monkeypatch)
    return torch.device("cpu")


def _emulate(kernels, monkeypatch):
    """Make `codec.py` run the CUDA kernels on CPU tensors, with the emulator."""

    def run(function, layout, *arguments):
        codec = kernels.Codec(layout.format.code, layout.block, layout.numel)
        getattr(kernels, f"{function}_cuda")(0, codec, *arguments)

    monkeypatch.setattr(codec_module, "_runner", lambda device: run)
    monkeypatch.setattr(codec_module, "_native", lambda layout: layout)


@pytest.mark.parametrize(("codec", "numel", "shift", "seed"), CASES, ids=str)
def test_kernels_equal_plain_pytorch(device, monkeypatch, codec, numel, shift, seed):
    check_equals_plain_pytorch(codec, numel, seed, device, monkeypatch, shift)


@pytest.mark.parametrize("codec", [Codec("int8", 64), Codec("e4m3", 512)], ids=["64", "512"])
def test_the_order_of_blocks_and_threads_does_not_matter(disordered, monkeypatch, codec):
    _emulate(disordered, monkeypatch)
    check_equals_plain_pytorch(codec, 9001, 3, torch.device("cpu"), monkeypatch)
