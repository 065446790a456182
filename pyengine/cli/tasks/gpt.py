"""A small byte-level GPT, trained on the sources of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

from pyengine.cli.tasks.base import IGNORED, Batch, Task

VOCAB = 256  # bytes
CONTEXT = 64
_TEXT_BYTES = 2 * 2**20
_HELD_OUT_BYTES = 64 * 2**10


class Block(nn.Module):
    """Attention, then an MLP, each applied to the normalized residual stream `[batch, time, width]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm_mlp(x))
        return x


@dataclass(frozen=True)
class Shape:
    """The size of a GPT, and the number of sequences per micro-batch."""

    width: int = 384
    layers: int = 8
    heads: int = 6
    vocabulary: int = 8192
    context: int = 32
    sequences: int = 1


class GPT(nn.Module):
    """A GPT that maps tokens `[batch, time]` to logits `[batch, time, vocabulary]`.

    Args:
        is_tied: whether the head shares its weight with the token embedding.
    """

    def __init__(self, shape: Shape, *, is_tied: bool = False) -> None:
        super().__init__()
        width = shape.width
        self.tokens = nn.Embedding(shape.vocabulary, width)
        self.places = nn.Embedding(shape.context, width)
        self.blocks = nn.Sequential(*(Block(width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(width)
        self.head = None if is_tied else nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        out = self.norm(self.blocks(self.tokens(x) + self.places(places)))
        return linear(out, self.tokens.weight if self.head is None else self.head.weight)


class TextTask(Task):
    """Prediction of the next byte of Python source code by a model with about 1.4 million parameters."""

    name = "gpt"
    unit = "tokens"

    def __init__(self) -> None:
        text = _standard_library()
        self._text, self._held_out = text[:-_HELD_OUT_BYTES], text[-_HELD_OUT_BYTES:]
        self.num_samples = (len(self._text) - 1) // CONTEXT

    def build(self) -> nn.Module:
        model = GPT(Shape(width=192, layers=3, vocabulary=VOCAB, context=CONTEXT))
        for embedding in (model.tokens, model.places):
            nn.init.normal_(embedding.weight, std=0.02)
        return model

    def batch(self, rows: Tensor) -> Batch:
        """Return non-overlapping pieces of text."""
        return _pieces(self._text, rows * CONTEXT)

    def batches(self, *, rank: int, world_size: int, micro_batch: int, seed: int) -> Iterator[Batch]:
        """Yield random pieces of text; every rank draws the positions for all ranks and uses only its own."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            places = torch.randint(len(self._text) - CONTEXT, (world_size, micro_batch), generator=generator)
            yield _pieces(self._text, places[rank])

    def short(self, batch: Batch, rank: int) -> Batch:
        """Ignore all but the first targets of each piece, as in a padded batch."""
        x, y = batch
        y = y.clone()
        y[:, CONTEXT // (4 + 2 * rank) :] = IGNORED
        return x, y

    @torch.no_grad()
    def quality(self, model: nn.Module) -> dict[str, float]:
        places = torch.arange(0, len(self._held_out) - CONTEXT, 8 * CONTEXT)
        x, y = _pieces(self._held_out, places)
        logits = model(x).float().flatten(0, 1)
        right = (logits.argmax(1) == y.flatten()).float().mean()
        return {"held_out_loss": float(cross_entropy(logits, y.flatten())), "accuracy": float(right)}


def _pieces(text: Tensor, places: Tensor) -> Batch:
    piece = text[places[:, None] + torch.arange(CONTEXT + 1)].long()
    return piece[:, :-1], piece[:, 1:]


def _standard_library() -> Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _TEXT_BYTES:
            break
    if len(text) < 2 * _HELD_OUT_BYTES:
        raise RuntimeError(
            f"{folder} has {len(text)} bytes of Python sources, expected at least {2 * _HELD_OUT_BYTES}: "
            "install the standard library package of this Python, or use --model cnn"
        )
    return torch.frombuffer(text[:_TEXT_BYTES], dtype=torch.uint8)
