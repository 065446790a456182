"""Models, data and references that the distributed tests share.

`Integers` has integer-valued gradients of any size and shape, so a window's gradient has one right answer, bit for bit:
`float32(sum of integers) * float32(1 / count)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import pyengine as pe

Batch = tuple[Tensor, Tensor]

KINDS = ("own", "own-native", "attach", "attach-view", "attach-unused")
WORLDS = (1, 2, 3, 4)


class Integers(nn.Module):
    """Parameters of odd sizes (a scalar among them) whose gradients are integers for integer inputs."""

    def __init__(self, dtype: torch.dtype, *, mixed: bool = False) -> None:
        super().__init__()
        other = torch.bfloat16 if mixed else dtype
        self.matrix = nn.Parameter(torch.ones(5, 3, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(3, dtype=other))
        self.scalar = nn.Parameter(torch.ones((), dtype=dtype))
        self.long = nn.Parameter(torch.ones(131, dtype=other))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return a 0-dim loss, summed over items; every product and sum is a small integer."""
        terms = [
            ((x.to(self.matrix.dtype) @ self.matrix) * t.to(self.matrix.dtype)).sum().float(),
            (self.bias * t.to(self.bias.dtype)).sum().float(),
            (self.scalar * t.to(self.scalar.dtype).sum()).float(),
            (self.long * x[:, :1].to(self.long.dtype)).sum().float(),
        ]
        return torch.stack(terms).sum()


def integers(seed: int, items: int = 3) -> Batch:
    """Return one micro-batch of small integers; the seed is its global index."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (items, 5), generator=generator).float()
    t = torch.randint(-2, 3, (items, 3), generator=generator).float()
    return x, t


def engine(kind: str, model: nn.Module, *, accumulate: int, **options: object) -> tuple[pe.Sync, nn.Module]:
    """Make the engine a case names; return it with the module to call."""
    if kind.startswith("own"):
        accumulator = "native" if kind == "own-native" else "fp32"
        return pe.GradSync(model, accumulate=accumulate, accumulator=accumulator, **options), model
    ddp = DistributedDataParallel(
        model,
        gradient_as_bucket_view=kind == "attach-view",
        find_unused_parameters=kind == "attach-unused",
        static_graph=kind == "attach-static",
        bucket_cap_mb=1e-5,
    )
    return pe.attach(ddp, accumulate=accumulate, **options), ddp


def mean_of_integers(model: Integers, batches: Sequence[Batch], count: float) -> dict[str, Tensor]:
    """Return the exact gradient of one big batch: integer sums in float64, then one float32 product, then the dtype."""
    twin = Integers(torch.float64)
    twin.zero_grad()
    for x, t in batches:
        twin(x.double(), t.double()).backward()
    inverse = torch.tensor(1.0 / count, dtype=torch.float64).float()
    return {
        name: (p.grad.float() * inverse).to(dict(model.named_parameters())[name].dtype)
        for name, p in twin.named_parameters()
        if p.grad is not None
    }


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of the gradients by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    """Compare bit for bit, None included."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None, name
            assert torch.equal(got[name], value), (name, got[name], value)


def clear(model: nn.Module, how: str) -> None:
    """Clear gradients in one of the ways that users have."""
    if how != "engine":
        for p in model.parameters():
            p.grad = None if how == "none" else torch.zeros_like(p)


class Collectives(TorchDispatchMode):
    """Records every collective that this thread launches, DDP's own included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::"))
            self.nbytes += sum(t.nbytes for t in args[0] if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def me() -> tuple[int, int]:
    """Return (rank, world size)."""
    return dist.get_rank(), dist.get_world_size()
