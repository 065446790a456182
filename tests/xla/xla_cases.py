"""Models, data and the float64 reference that the tests on XLA replicas share.

Nothing here draws random numbers: replicas are threads of one process, which would share the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pyengine as pe

# Number of micro-batches by rank. Since accumulate is 3, some windows are short, or missing on some ranks.
PLANS = {
    "equal": [6, 6, 6, 6],
    "short last window": [5, 5, 5, 5],
    "unequal": [7, 3, 5, 1],
    "one rank has nothing": [4, 0, 3, 4],
}
ACCUMULATE = 3
FP32 = pe.wire.FP32()
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, **_: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params, capturable: torch.optim.AdamW(params, lr=0.01, capturable=capturable),
}


def waves(*shape: int, phase: float) -> Tensor:
    """Return numbers in [-1, 1] without a generator."""
    numel = torch.Size(shape).numel()
    return torch.sin(torch.arange(numel, dtype=torch.float64) * 0.7 + phase).reshape(shape)


def mlp(dtype: torch.dtype = torch.float32, *, width: int = 16) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
    fill(model)
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill every parameter with fixed values."""
    for index, param in enumerate(model.parameters()):
        param.copy_(waves(*param.shape, phase=index) * 0.3)


def micro_batch(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of 1 to 4 items, float64."""
    items = 1 + (rank + 2 * index) % 4
    return waves(items, 6, phase=rank + 10 * index), waves(items, 3, phase=50 + rank + 10 * index)


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum()


def assert_near(params: Sequence[Tensor], right: Sequence[Tensor], tolerance: float = 1e-6) -> None:
    """Compare with float64.

    The unit roundoff of float32 is 6e-8; a parameter of size 0.3 is rounded a few dozen times in at most
    three steps.
    """
    for param, each in zip(params, right, strict=True):
        torch.testing.assert_close(param.double(), each.double(), rtol=0, atol=tolerance)


def device() -> torch.device:
    import torch_xla

    return torch_xla.device()


@dataclass
class Outcome:
    """The results of one replica, on the host."""

    params: list[Tensor]
    state: list[Tensor]
    norms: list[float]
    stepped: list[bool]
    records: list[pe.StepRecord]
    scale: float


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        plan: micro-batches of each rank.
        optimizer: name in `OPTIMIZERS`.
        spoil: (rank, index) of a micro-batch whose loss becomes inf on that rank only.
        tensor_counts: give counts as tensors on the device.
        scaler: use a GradScaler.
    """

    plan: Sequence[int]
    optimizer: str = "sgd"
    clip: float = 0.5
    spoil: tuple[int, int] | None = None
    tensor_counts: bool = False
    scaler: bool = False
    wire: pe.wire.Wire = FP32
    nonfinite: str = "skip"
    dtype: torch.dtype = torch.float32


def train(rank: int, job: Job) -> Outcome:
    here = device()
    model = mlp(job.dtype).to(here)
    sync = pe.GradSync(model, accumulate=ACCUMULATE, wire=job.wire, nonfinite=job.nonfinite)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters(), capturable=True)
    if job.scaler:
        sync.scaler = pe.GradScaler("xla", init_scale=2.0**10)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    norms, stepped = [], []
    for window in sync.windows(range(job.plan[rank])):
        for index in window:
            x, y = (tensor.to(here, job.dtype) for tensor in micro_batch(rank, index))
            loss = loss_sum(model, x, y).float()
            if job.spoil == (rank, index):
                loss = loss * torch.tensor([float("inf")]).to(here)[0]
            count = torch.tensor(len(x)).to(here) if job.tensor_counts else len(x)
            sync.backward(loss, count=count)
        norms.append(sync.clip_grad_norm_(job.clip))
        stepped.append(sync.step(optimizer))
    params = list(model.parameters())
    state = [value.cpu() for p in params for value in optimizer.state[p].values() if value is not None]
    return Outcome(
        params=[param.detach().cpu() for param in params],
        state=state,
        norms=[float(norm) for norm in norms],
        stepped=[bool(flag) for flag in stepped],
        records=records,
        scale=1.0 if sync.scaler is None else sync.scaler.get_scale(),
    )


def reference(job: Job, world: int, *, without: Sequence[int] = ()) -> list[Tensor]:
    """Train in float64 on the global batch; return the parameters.

    Args:
        without: windows to leave out.
    """
    model = mlp(torch.float64)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters(), capturable=False)
    plan = job.plan[:world]
    for window in range(-(-max(plan) // ACCUMULATE)):
        if window in without:
            continue
        optimizer.zero_grad()
        count = 0
        for rank, total in enumerate(plan):
            for index in range(window * ACCUMULATE, min(total, (window + 1) * ACCUMULATE)):
                x, y = micro_batch(rank, index)
                loss_sum(model, x, y).backward()
                count += len(x)
        for param in model.parameters():
            param.grad /= count
        nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
    return [param.detach() for param in model.parameters()]
