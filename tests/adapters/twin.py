"""A model with several FSDP units, and its training in one float64 process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from worlds import FEATURES

LR, MOMENTUM = 0.05, 0.5
# A float32 forward and backward through two small layers: each error is about 2^-24.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Block(nn.Linear):
    """A layer that is an FSDP unit."""


class Net(nn.Module):
    """A unit that contains two units and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = Block(FEATURES, 4), Block(4, 1)
        self.scale = nn.Parameter(torch.ones(()).reshape(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def shard(net: Net, mesh: DeviceMesh) -> None:
    """Apply `fully_shard` to the net and its two layers, unless the net is already sharded."""
    if not isinstance(net, FSDPModule):
        for part in (net.first, net.second, net):
            fully_shard(part, mesh=mesh)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


def decay(step: int) -> float:
    return 0.9**step


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return the unsharded parameters; every rank must call this."""
    return [param.full_tensor().detach().clone() for param in model.parameters()]


class Twin:
    """The training in one float64 process, with the expected results.

    Args:
        scheduler_steps: scheduler steps per window; Accelerate steps its scheduler once per rank.
    """

    def __init__(self, scheduler_steps: int = 0) -> None:
        self.net, self._scheduler_steps = Net().double(), scheduler_steps
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LR, momentum=MOMENTUM)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)

    def train(
        self, by_rank: Sequence[Sequence[Tensor]], accumulate: int, *, clip: str = "", broken: int = -1
    ) -> list[Tensor]:
        """Train on each window of all ranks as one batch; return the norms before clipping."""
        norms, params = [], list(self.net.parameters())
        for start in range(0, max(map(len, by_rank)), accumulate):
            if start <= broken < start + accumulate:
                continue
            x = torch.cat([x for seen in by_rank for x in seen[start : start + accumulate]]).double()
            self.optimizer.zero_grad()
            (self.net(x).square().sum() / len(x)).backward()
            if clip == "value":
                nn.utils.clip_grad_value_(params, 0.25)
            elif clip:
                norms.append(nn.utils.clip_grad_norm_(params, 0.5, norm_type=float(clip)))
            self.optimizer.step()
            for _ in range(self._scheduler_steps):
                self.scheduler.step()
        return norms

    def check(self, weights: Sequence[Tensor], **close: float) -> None:
        for mine, right in zip(weights, self.net.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), right.detach(), **close or CLOSE)
