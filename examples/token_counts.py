"""Average over tokens if their number differs between micro-batches: python examples/token_counts.py

Pass the loss summed over tokens and the number of tokens to `backward`. The window's gradient is then that of
one batch of all sequences, however they are distributed. A mean of means would favour the tokens of short
sequences.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pyengine as pe

PADDING = -100
LENGTHS = [3, 17, 8, 2, 11, 5, 13, 1]  # tokens of each sequence


def sequences() -> list[tuple[Tensor, Tensor]]:
    """Return each sequence's inputs `[20, 6]` and labels `[20]`, padded after its own tokens."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(len(LENGTHS), 20, 6, generator=generator)
    labels = torch.randint(0, 3, (len(LENGTHS), 20), generator=generator)
    for row, length in zip(labels, LENGTHS, strict=True):
        row[length:] = PADDING
    return list(zip(inputs, labels, strict=True))


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss summed over the tokens that are not padding."""
    return cross_entropy(model(x), y, ignore_index=PADDING, reduction="sum")


def train() -> float:
    """Return the largest difference from the gradient of one batch of all tokens, which is only rounding."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    data = sequences()
    mine = data[dist.get_rank() :: dist.get_world_size()]
    sync = pe.GradSync(model, accumulate=len(mine))
    for window in sync.windows(mine):
        for x, y in window:
            sync.backward(loss_sum(model, x, y), count=(y != PADDING).sum())  # a tensor, so no host sync
        sync.unscale_()

    whole = sum(loss_sum(model, x, y) for x, y in data) / sum(LENGTHS)
    (expected,) = torch.autograd.grad(whole, [model.weight])
    return float((model.weight.grad - expected).abs().max())


if __name__ == "__main__":
    print("largest difference from one big batch:", max(pe.launch(train, workers=2)))
