"""Models of the window benchmark: a GPT and a stack of small layers.

Each of them also has a variant whose backward computes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pyengine.cli.tasks import gpt
from pyengine.cli.tasks.gpt import Shape

# GPT-2 with half the context length; the vocabulary is rounded up to a multiple of 128, as usual.
GPT2 = Shape(width=768, layers=12, heads=12, vocabulary=50304, context=512, sequences=4)
# A GPU computes these micro-batches faster than the host launches them.
GPT2_SHORT = replace(GPT2, context=256, sequences=1)
# These micro-batches fill a GPU.
GPT2_LONG = replace(GPT2, context=1024, sequences=8)


class GPT(gpt.GPT):
    """The GPT of `train` with a tied head: 17.4 M parameters in 100 tensors by default.

    The model's output is the loss, so that every variant wraps the whole computation.
    """

    def __init__(self, shape: Shape = Shape()) -> None:  # noqa: B008 - frozen
        super().__init__(shape, is_tied=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean next-token loss, in float32 or wider, for int64 tokens `[batch, context + 1]`."""
        logits = super().forward(tokens[:, :-1]).flatten(0, 1)
        return cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten()
        )


class Small(nn.Module):
    """500 linear layers of width 64: 1000 parameters of 16 KB or 256 B each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(500)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out.square().mean().float()


class Premade(nn.Module):
    """A model's parameters, with a backward that computes nothing, so that only the overhead is timed.

    There is one autograd node per parameter, in the order of a real backward, and every gradient is a new
    tensor, as in a real backward. The gradient elements are 0.001 times the mean of the micro-batch.
    """

    def __init__(self, like: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(p.detach().to(dtype)) for p in like.parameters()])

    def forward(self, seed: Tensor) -> Tensor:
        x = torch.ones((), device=self.values[0].device, requires_grad=True)
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
        # `grad` may be on an accelerator, so the host must not read it.
        return grad, torch.empty_like(ctx.like).copy_((1e-3 * grad).to(ctx.like.dtype))


class Autocast(nn.Module):
    """A module with float32 parameters and a forward under autocast to `dtype`."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            out: Tensor = self.inner(x)
        return out.float()


_SHAPES = {
    "gpt": Shape(),
    "gpt0": Shape(),
    "gpt100": Shape(480),
    "gpt124": GPT2,
    "gpt124-short": GPT2_SHORT,
    "gpt124-long": GPT2_LONG,
}
_CPU = torch.device("cpu")
_PREMADE = ("gpt0", "small0")
MODELS = (*_SHAPES, "small", "small0")
MICRO_BATCHES = 8


def build(
    name: str,
    dtype: torch.dtype,
    rank: int,
    *,
    micro_batches: int = MICRO_BATCHES,
    device: torch.device = _CPU,
) -> tuple[nn.Module, list[Tensor]]:
    """Return a model, which is the same on every rank, and the micro-batches of this rank.

    "gpt0" and "small0" are `Premade`, "gpt100" has 100 MB of fp32 gradients, "gpt124" has 124 M parameters.
    With float16, the parameters are float32 and the forward runs under autocast. "gpt124-long" is compiled,
    and with float32 it runs under autocast to bfloat16.
    """
    is_long = name == "gpt124-long"
    held = torch.float32 if dtype == torch.float16 else dtype
    torch.manual_seed(0)
    model = _model(name, held).to(device)
    if is_long:
        model.compile()
    torch.manual_seed(1 + rank)
    batches = [_micro_batch(name, held, rank).to(device) for _ in range(micro_batches)]
    if dtype == torch.float16:
        return Autocast(model, torch.float16), batches
    return Autocast(model, torch.bfloat16) if is_long and dtype == torch.float32 else model, batches


def needs_scale(model: nn.Module) -> bool:
    """Return whether to scale losses: not in bfloat16, since torch cannot unscale its gradients on CUDA."""
    dtype = model.dtype if isinstance(model, Autocast) else next(model.parameters()).dtype
    return dtype is not torch.bfloat16


def _model(name: str, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = GPT(_SHAPES[name]) if name in _SHAPES else Small()
    return Premade(model, dtype) if name in _PREMADE else model.to(dtype)


def _micro_batch(name: str, dtype: torch.dtype, rank: int) -> Tensor:
    if name in _PREMADE:
        return rank + torch.rand(2)  # scales the gradients of `Premade`, which must differ between ranks
    if name == "small":
        return torch.randn(8, 64, dtype=dtype)
    shape = _SHAPES[name]
    return torch.randint(shape.vocabulary, (shape.sequences, shape.context + 1))
