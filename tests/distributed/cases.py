"""Models, data and reference results that are shared by the distributed tests.

`Integers` has integer-valued gradients of any size and shape, so a window's gradient has one right answer,
bit for bit: `float32(sum of integers) * float32(1 / count)`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import pyengine as pe
from pyengine.comm import torch_dist

Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}

KINDS = ("own", "own-native", "attach", "attach-view", "attach-unused")
WORLDS = (1, 2, 3, 4)
WIRES = {"fp32": pe.wire.FP32(), "bf16": pe.wire.BF16(), "fp16": pe.wire.FP16()}

# The number of micro-batches of each rank; accumulate is 3, so windows are short or missing on some ranks.
PLANS = {
    "equal": [6, 6, 6, 6],
    "short last window": [5, 5, 5, 5],
    "unequal": [7, 3, 5, 1],
    "one rank has nothing": [4, 0, 3, 4],
}


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


class Inject(torch.autograd.Function):
    """Identity with a gradient of `value` times the true one; the loss is finite."""

    @staticmethod
    def forward(ctx, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.value, None


class Breaks(torch.autograd.Function):
    """Identity whose backward runs out of memory while `now` is set."""

    now = False

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        if Breaks.now:
            raise MemoryError("no room for a gradient")
        return grad


def raise_key_error(*_: object) -> None:
    """Fail, in place of a hook or another function of the user."""
    raise KeyError("in the user's code")


class FutureWork:
    """A collective that completes or fails with its future."""

    def __init__(self, future: torch.futures.Future[list[Tensor]]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


def engine(kind: str, model: nn.Module, *, accumulate: int, **options: object) -> tuple[pe.Sync, nn.Module]:
    """Create the engine that `kind` names; return it and the module to call."""
    if kind.startswith("own"):
        options = {"accumulator": kind.partition("-")[2] or "fp32", **options}
        return pe.GradSync(model, accumulate=accumulate, **options), model
    ddp = DistributedDataParallel(
        model,
        gradient_as_bucket_view="view" in kind,
        find_unused_parameters="unused" in kind,
        static_graph=kind == "attach-static",
        bucket_cap_mb=1e-5,
    )
    return pe.attach(ddp, accumulate=accumulate, **options), ddp


def mean_of_integers(model: Integers, batches: Sequence[Batch], count: float) -> dict[str, Tensor]:
    """Return the gradient of one big batch: float64 sums, then one float32 product, then the dtype."""
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


def window_of_integers(
    sync: pe.Sync, forward: nn.Module, model: Integers, number: int = 0, items: int = 3
) -> dict[str, Tensor]:
    """Run a window of two micro-batches per rank; return the gradient of one big batch."""
    rank, world = me()
    for k in range(2):
        with sync.accumulate():
            sync.backward(forward(*integers(100 * number + 10 * rank + k, items)), count=items)
    batches = [integers(100 * number + 10 * r + k, items) for r in range(world) for k in range(2)]
    return mean_of_integers(model, batches, items * len(batches))


def windows_of_integers(sync: pe.Sync, forward: nn.Module, model: Integers, num: int = 2) -> None:
    """Run several windows with `window_of_integers`, and compare each with one big batch."""
    for number in range(num):
        mean = window_of_integers(sync, forward, model, number, items=4)
        sync.unscale_()
        assert_same(grads(model), mean)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of the gradients by name, on the CPU."""
    return {name: None if p.grad is None else p.grad.clone().cpu() for name, p in model.named_parameters()}


def assert_same(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    """Compare bit for bit; None equals only None."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None, name
            assert torch.equal(got[name], value), (name, got[name], value)


def clear(model: nn.Module, how: str) -> None:
    """Clear gradients in one of the usual ways, or let the engine clear them."""
    if how != "engine":
        for p in model.parameters():
            p.grad = None if how == "none" else torch.zeros_like(p)


@dataclass(frozen=True)
class Training:
    """What `train_integers` trains, on every rank.

    Attributes:
        kind: kind of engine, see `engine`.
        plan: number of micro-batches of each rank.
        dtype: dtype of the parameters; with `mixed`, every other parameter is bfloat16.
        how: how gradients are cleared between windows, see `clear`.
        device: device of the model and data.
        options: other arguments of the engine.
        wire: narrow wires are also exact if every window's count is a power of two, see `items`.
    """

    kind: str
    plan: Sequence[int]
    dtype: torch.dtype = torch.float32
    mixed: bool = False
    how: str = "engine"
    device: str = "cpu"
    wire: pe.wire.Wire = pe.wire.FP32()  # noqa: RUF009 - frozen
    options: dict[str, Any] = field(default_factory=dict)

    def items(self, rank: int, micro_batch: int) -> int:
        """Return the size of a micro-batch: 1 to 4, or for a narrow wire 4 (on rank 2: 8).

        With a narrow wire, windows of four micro-batches count 16, 32 and 64 items on 1, 2 and 3 ranks. Sums
        of these small integers, whose signs are random, stay below 2^8, so quotients and their sums over
        ranks are exact in bfloat16.
        """
        if self.wire.dtype == torch.float32:
            return 1 + (rank + 2 * micro_batch) % 4
        return 8 if rank == 2 else 4

    @property
    def accumulate(self) -> int:
        """Micro-batches per window."""
        return 3 if self.wire.dtype == torch.float32 else 4

    def windows(self, world: int) -> list[list[tuple[int, int]]]:
        """Return the (rank, micro-batch) pairs of every global window."""
        size, plan = self.accumulate, self.plan[:world]
        last = -(-max(plan) // size)
        return [
            [(r, k) for r in range(world) for k in range(size * w, min(size * w + size, plan[r]))]
            for w in range(max(last, 1))
        ]


def train_integers(case: Training) -> None:
    """Train and compare every window's gradient, bit for bit, with that of one big batch."""
    rank, world = me()
    model = Integers(case.dtype, mixed=case.mixed).to(case.device)
    sync, forward = engine(case.kind, model, accumulate=case.accumulate, wire=case.wire, **case.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    windows = case.windows(world)
    loader = [(k, integers(100 * rank + k, case.items(rank, k))) for k in range(case.plan[rank])]
    seen = 0
    for number, window in enumerate(sync.windows(loader)):
        for k, (x, t) in window:
            loss = forward(x.to(case.device), t.to(case.device))
            sync.backward(loss, count=case.items(rank, k))
        members = windows[number]
        batches = [integers(100 * r + k, case.items(r, k)) for r, k in members]
        assert_same(grads(model), mean_of_integers(model, batches, sum(case.items(*m) for m in members)))
        sync.unscale_()
        assert sync.step(optimizer)
        clear(model, case.how)
        seen += 1
    assert seen == len(windows)


def clip_and_step(
    kind: str,
    make: Callable[..., torch.optim.Optimizer],
    max_norm: float,
    device: str = "cpu",
    norm_type: float | str = 2.0,
) -> None:
    """Train, and compare every step with float64 training of the whole batch in one process."""
    rank, world = me()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(device)
    twin = copy.deepcopy(model).double()
    sync, forward = engine(kind, model, accumulate=3)
    optimizer, other = make(model.parameters()), make(twin.parameters())
    generator = torch.Generator().manual_seed(5)
    data = [[torch.randn(2, 6, generator=generator).to(device) for _ in range(9)] for _ in range(world)]
    for number, window in enumerate(sync.windows(data[rank])):
        for x in window:
            sync.backward(forward(x).square().sum(), count=2)
        norm = sync.clip_grad_norm_(max_norm, norm_type)
        assert sync.step(optimizer)
        batch = torch.cat([x for mine in data for x in mine[3 * number : 3 * number + 3]]).double()
        twin.zero_grad()
        (twin(batch).square().sum() / len(batch)).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm, float(norm_type))
        other.step()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            # 18 fp32 additions per window and Adam's quotient, over 3 steps of at most 0.1
            torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-5)


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


def rings_only() -> Any:
    """Return a context in which gloo's own all-reduce also reduces small tensors."""
    return mock.patch.object(torch_dist, "_MAX_SMALL_BYTES", -1)


def comm_of_buckets(sync: pe.Sync) -> Any:
    """Return the transport of an engine's gradients; there must be only one."""
    (comm,) = sync._engine.reducer._groups.comms
    return comm


def records_of(sync: pe.Sync) -> list[pe.StepRecord]:
    """Return a list to which the record of every step is appended."""
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    return records


@contextmanager
def recorded_warnings(category: type[Warning] = UserWarning) -> Iterator[list[str]]:
    """Yield a list, which contains the texts of the body's warnings of a category after the body has run."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught if issubclass(warning.category, category)]


def me() -> tuple[int, int]:
    """Return (rank, world size)."""
    return dist.get_rank(), dist.get_world_size()


def assert_alike(value: Any) -> None:
    """Assert that all ranks have the same value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert found == found[:1] * len(found)


def error_of(fn: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return the message of the error that a call raises, or "no error"."""
    return typed_error_of(fn, *args, **kwargs).split(": ", 1)[-1]


def typed_error_of(fn: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return the type and message of the error that a call raises, or "no error"."""
    try:
        fn(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
