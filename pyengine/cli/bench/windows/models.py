"""Models for the window benchmark: a small GPT that computes,
and parameter sets whose backward costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyengine.cli.tasks.gpt import Block

GPT_WIDTH, GPT_LAYERS, GPT_VOCABULARY, GPT_CONTEXT = 384, 8, 8192, 32
_HEADS = 6


class GPT(nn.Module):
    """17.4 M parameters in 100 tensors at the default width.

    Blocks are those of `train`'s GPT, which is another model all the same: here the head is tied to the
    embedding and the loss is the model's output, so that every variant wraps all of the work.
    """

    def __init__(self, width: int = GPT_WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(GPT_VOCABULARY, width)
        self.place = nn.Embedding(GPT_CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, _HEADS) for _ in range(GPT_LAYERS)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting the tokens from each other; tokens int64 `[batch,
        context + 1]`.
        """
        x = self.embed(tokens[:, :-1]) + self.place.weight
        logits = F.linear(self.norm(self.blocks(x)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Small(nn.Module):
    """500 linear layers of 64: 1000 parameters of 16 KB and 256 B, really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(500)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out.square().mean().float()


class Premade(nn.Module):
    """Parameters of another model whose gradients are there already: what is timed is the machinery alone.

    One autograd node a parameter, in the order of a real backward; every gradient is a fresh tensor, as in a
    real one. Its elements are 0.001 times the mean of the micro-batch.
    """

    def __init__(self, like: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(p.detach().to(dtype)) for p in like.parameters()])

    def forward(self, seed: Tensor) -> Tensor:
        x = torch.ones((), requires_grad=True)
        for value in self.values:
            x = _Premade.apply(x, value)  # type: ignore[no-untyped-call]
        return x * seed.mean()


class _Premade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.like = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.full_like(ctx.like, 1e-3 * grad.item())


MODELS = ("gpt", "small", "gpt0", "small0", "gpt100")
MICRO_BATCHES = 8
_PREMADE: dict[str, type[GPT | Small]] = {"gpt0": GPT, "small0": Small}


def build(name: str, dtype: torch.dtype, rank: int) -> tuple[nn.Module, list[Tensor]]:
    """Return the model of a case, the same on every rank, and this rank's micro-batches for it.

    "gpt0" and "small0" have gradients that are there already, "gpt100" has 100 MB of them in fp32.
    """
    torch.manual_seed(0)
    model = _model(name, dtype)
    torch.manual_seed(1 + rank)
    return model, [_micro_batch(name, dtype, rank) for _ in range(MICRO_BATCHES)]


def _model(name: str, dtype: torch.dtype) -> nn.Module:
    if name in _PREMADE:
        return Premade(_PREMADE[name](), dtype)
    if name == "small":
        return Small().to(dtype)
    return GPT(480 if name == "gpt100" else GPT_WIDTH).to(dtype)


def _micro_batch(name: str, dtype: torch.dtype, rank: int) -> Tensor:
    if name in ("gpt", "gpt100"):
        return torch.randint(GPT_VOCABULARY, (1, GPT_CONTEXT + 1))
    if name == "small":
        return torch.randn(8, 64, dtype=dtype)
    return rank + torch.rand(2)  # what `Premade` multiplies its gradients by: ranks must differ
