"""The models that `bench_peers.py` trains, and micro-batches for windows of any length.

The models are those of `python -m pyengine bench` at several sizes, and a CNN.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyengine.cli.bench.models import GPT, Premade, Shape, Small

WIDTHS = {"gpt": 384, "gpt-5m": 192, "gpt-26m": 480}  # 17.4, 5.1 and 26 M parameters
_IMAGE, _CLASSES, _IMAGES = 32, 10, 4


class ConvNet(nn.Module):
    """A CNN with 6.3 M parameters in 20 tensors, and 6 BatchNorm layers; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = (3, 64, 128, 256, 512, 512, 512)
        for index, (ins, outs) in enumerate(pairwise(channels)):
            layers += [nn.Conv2d(ins, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs), nn.ReLU()]
            if index < 4:
                layers.append(nn.MaxPool2d(2))
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(channels[-1] * (_IMAGE // 16) ** 2, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean loss over images `[batch, 3, 32, 32]` whose class is in their first pixel."""
        classes = images[:, 0, 0, 0].long()
        logits = self.head(self.body(images).flatten(1))
        return F.cross_entropy(logits.float(), classes)


def build_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model that is equal on every rank; if its name ends with 0, its backward computes nothing."""
    torch.manual_seed(0)
    if name.endswith("0"):
        return Premade(_real(name[:-1], torch.float32), dtype)
    return _real(name, dtype)


def _real(name: str, dtype: torch.dtype) -> nn.Module:
    if name == "small":
        return Small().to(dtype)
    if name == "cnn":
        return ConvNet().to(dtype)
    return GPT(Shape(WIDTHS[name])).to(dtype)


def build_micro_batches(name: str, dtype: torch.dtype, *, rank: int, num: int) -> list[Tensor]:
    """Return a rank's micro-batches for one window."""
    torch.manual_seed(1 + rank)
    return [_micro_batch(name, dtype, rank) for _ in range(num)]


def _micro_batch(name: str, dtype: torch.dtype, rank: int) -> Tensor:
    if name.endswith("0"):
        return rank + torch.rand(2)  # scales the gradients of `Premade`, which must differ between ranks
    if name == "small":
        return torch.randn(8, 64).to(dtype)
    if name == "cnn":
        images = torch.randn(_IMAGES, 3, _IMAGE, _IMAGE)
        images[:, 0, 0, 0] = torch.randint(_CLASSES, (_IMAGES,)).float()
        return images.to(dtype)
    return torch.randint(Shape.vocabulary, (1, Shape.context + 1))
