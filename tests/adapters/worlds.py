"""Helpers for adapter tests: items with known gradients, a recording optimizer, a launcher's environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

FEATURES = 3
# A mean of float32 numbers: one rounding in 1/count, one in the product, one in the sum's last place.
CLOSE = {"rtol": 3 * 2.0**-23, "atol": 0.0}


class Weights(nn.Linear):
    """A model for which `model(x).sum()` has the gradient `x.sum(0)`, whatever its weights."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 1, bias=False)


class Remembering(torch.optim.SGD):
    """SGD that keeps a copy of every gradient it steps with."""

    def __init__(self, model: nn.Module, lr: float = 0.25) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.stepped_with: list[Tensor] = []

    def step(self, closure=None):
        """Run the closure that Lightning's own strategies pass, record the gradient, and step."""
        result = None if closure is None else torch.enable_grad()(closure)()
        grads = [param.grad for param in self.param_groups[0]["params"] if param.grad is not None]
        self.stepped_with += [torch.cat([grad.flatten() for grad in grads])]
        super().step()
        return result


def items(num: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 8, (num, FEATURES), generator=generator).float()


def mean_of_windows(by_rank: Sequence[Sequence[Tensor]], accumulate: int) -> list[Tensor]:
    """Return each window's mean gradient over the items of all ranks, computed in float64."""
    windows = []
    for start in range(0, max(map(len, by_rank)), accumulate):
        seen = [x for micro_batches in by_rank for x in micro_batches[start : start + accumulate]]
        windows.append(torch.cat(seen).double().mean(0).float())
    return windows


def refusal(run: Callable[[], object]) -> str:
    try:
        run()
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return str(error)
    return "nothing was refused"


@contextmanager
def launched() -> Iterator[None]:
    """Set the environment of a launcher for this rank of the default group; without a group, do nothing."""
    if not dist.is_initialized():
        yield
        return
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), rank) | dict.fromkeys(
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world
    )
    names |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    names |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    with patch.dict(os.environ, names):
        yield
