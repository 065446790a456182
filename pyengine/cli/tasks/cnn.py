"""A small convolutional network with batch norm, on scikit-learn's 8 x 8 images of digits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pyengine.cli.tasks.base import Batch, Task

_TEST_IMAGES = 360  # of 1797


class ConvNet(nn.Module):
    """A network that maps images `[batch, 1, 8, 8]` to logits `[batch, 10]`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.to(self.head.weight.dtype)).flatten(1))
        return logits


class DigitsTask(Task):
    name = "cnn"
    unit = "images"

    def __init__(self) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        labels = torch.from_numpy(digits.target).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[:-_TEST_IMAGES], order[-_TEST_IMAGES:]
        self._images, self._labels = images[train], labels[train]
        self._test = images[test], labels[test]
        self.num_samples = len(train)

    def build(self) -> nn.Module:
        return ConvNet()

    def batch(self, rows: Tensor) -> Batch:
        return self._images[rows], self._labels[rows]

    def batches(self, *, rank: int, world_size: int, micro_batch: int, seed: int) -> Iterator[Batch]:
        """Yield full micro-batches from shuffled epochs; in an epoch, each image is used by only one rank."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self._labels), generator=generator)
            mine = order[rank::world_size][: len(order) // world_size]
            for piece in mine.split(min(micro_batch, len(mine))):
                if len(piece) == min(micro_batch, len(mine)):
                    yield self.batch(piece)

    def short(self, batch: Batch, rank: int) -> Batch:
        """Keep only the first images of a micro-batch; higher ranks keep fewer images."""
        x, y = batch
        keep = max(1, len(y) // (4 + 2 * rank))
        return x[:keep], y[:keep]

    @torch.no_grad()
    def quality(self, model: nn.Module) -> dict[str, float]:
        images, labels = self._test
        model.eval()
        right = (model(images).argmax(1) == labels).float().mean()
        model.train()
        return {"accuracy": float(right)}
