"""Micro-batches that run out of memory, at every operation, on one rank, over every owner of gradients."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import engine, me
from marks import rest
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pyengine as pe

ITEMS = 4
MICRO_BATCHES = 3


class Allocator(TorchDispatchMode):
    """Runs out of memory where an operation returns new memory: at the n-th one, or for too many elements."""

    def __init__(self, *, at: int = -1, largest: float = float("inf")) -> None:
        super().__init__()
        self.at, self.largest = at, largest
        self.seen = 0

    @property
    def has_failed(self) -> bool:
        return 0 <= self.at < self.seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if not func._schema.is_mutable and not func.is_view:
            self.seen += 1
            if self.seen == self.at + 1 or (isinstance(made, Tensor) and made.numel() > self.largest):
                raise torch.OutOfMemoryError(f"no room for {func}")
        return made


@contextmanager
def limited(allocator: Allocator) -> Iterator[Callable[[Callable[[Any], Any]], Callable[[Any], Any]]]:
    """Let backwards of parts allocate from `allocator`; the function made of `fn` does, too."""
    run = pe.MicroBatch.backward

    def backward(self: pe.MicroBatch, loss: Tensor) -> None:
        with allocator:
            run(self, loss)

    def within(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def forward(part: Any) -> Any:
            with allocator:
                return fn(part)

        return forward

    pe.MicroBatch.backward = backward
    try:
        yield within
    finally:
        pe.MicroBatch.backward = run


class Net(nn.Module):
    """A checkpointed segment, dropout, a BatchNorm that only tracks, and a parameter that is used late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5)
        self.late = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, is_last: bool) -> Tensor:
        self.calls = self.calls + 1  # another tensor, not a write
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        self.norm(hidden.detach())
        out = self.second(nn.functional.dropout(hidden, 0.5))
        return (out * self.late if is_last else out).square().sum()


def batch(rank: int, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * rank + index)
    is_last = index == MICRO_BATCHES - 1
    return {"x": torch.randn(ITEMS, 3, generator=generator), "names": ["a"] * ITEMS, "is_last": is_last}


class Run:
    """One window, again and again from the same state, on this rank."""

    def __init__(self, kind: str) -> None:
        self.model = Net()
        self.rank, _ = me()
        self.sync, self.forward = engine(kind, self.model, accumulate=MICRO_BATCHES)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    def micro_batch(self, part: dict[str, Any]) -> tuple[Tensor, int]:
        assert len(part["names"]) == len(part["x"])
        return self.forward(part["x"], part["is_last"]), len(part["x"])

    def window(self, one: Callable[[int, dict[str, Any]], None]) -> list[Tensor]:
        """Train a window from the start, a micro-batch by `one`; return parameters, buffers, random state."""
        self.model.load_state_dict(self.start)
        self.sync.part_size = None
        torch.manual_seed(self.rank)
        for window in self.sync.windows([batch(self.rank, index) for index in range(MICRO_BATCHES)]):
            for index, each in enumerate(window):
                one(index, each)
            self.sync.step(self.optimizer)
        state = [value.clone() for value in self.model.state_dict().values()]
        return [*state, torch.get_rng_state()]

    def by_hand(self, sizes: list[int]) -> list[Tensor]:
        """Train the window with blocks of several backwards, each micro-batch in parts of a size."""

        def one(index: int, each: dict[str, Any]) -> None:
            starts = range(0, ITEMS, sizes[index])
            with self.sync.micro_batch(count=ITEMS):
                for start in starts:
                    part = each | {key: each[key][start : start + sizes[index]] for key in ("x", "names")}
                    # Not through DDP, which would broadcast buffers in this forward, and not behind the last.
                    self.model(part["x"], part["is_last"]).backward()

        return self.window(one)

    def failing(self, allocator: Allocator, at: int, *, fails: bool = True) -> list[Tensor]:
        """Train the window; memory runs out in the micro-batch `at`."""

        def one(index: int, each: dict[str, Any]) -> None:
            if index != at or not fails:
                self.sync.retry_smaller(each, self.micro_batch)
                return
            with limited(allocator) as within:
                self.sync.retry_smaller(each, within(self.micro_batch))

        return self.window(one)


def assert_equal(got: list[Tensor], want: list[Tensor], *about: object) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), (index, *about)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("own-native", 1),
        ("own", 2),
        ("own-native", 2),
        ("own-exact", 2),
        ("attach", 2),
        ("attach-view", 2),
        *rest(("own", 1), ("own-exact", 1), ("attach", 1), ("attach-unused", 2), ("attach-static", 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:4 items of a micro-batch:UserWarning")
@on_ranks()
def test_memory_that_runs_out_at_any_operation_leaves_no_trace(kind):
    """The last rank fails. It ends with the bits of blocks that were cut by hand; dropout draws the same."""
    gc.freeze()  # a failure collects garbage: of torch's many objects for half a second
    run = Run(kind)
    fails = run.rank == me()[1] - 1
    for at in range(MICRO_BATCHES):
        sizes = [ITEMS if index < at or not fails else ITEMS // 2 for index in range(MICRO_BATCHES)]
        for _ in range(2):  # DDP's first window differs: it learns the order of buckets
            want = run.by_hand(sizes)
        for operation in itertools.count():
            allocator = Allocator(at=operation)
            got = run.failing(allocator, at, fails=fails)
            has_failed: list[Any] = [None] * me()[1]
            torch.distributed.all_gather_object(has_failed, allocator.has_failed)
            if not any(has_failed):
                break
            assert_equal(got, want, at, operation)
            assert run.sync.part_size == (ITEMS // 2 if fails else None)
            assert run.sync.last_record.num_retries == fails
        assert operation > 20  # forward, recomputation and backward
    gc.unfreeze()
