"""Micro-batches that run out of memory on one rank, at any operation, with every owner of gradients."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from cases import (
    Integers,
    assert_same,
    engine,
    error_of,
    grads,
    integers,
    me,
    mean_of_integers,
)
from marks import rest
from ranks import on_ranks
from sharded_cases import Chain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pyengine as pe

ITEMS = 4
MICRO_BATCHES = 3


class Allocator(TorchDispatchMode):
    """Runs out of memory at the n-th operation that returns new memory."""

    def __init__(self, *, at: int = -1) -> None:
        super().__init__()
        self.at, self.seen = at, 0

    @property
    def has_failed(self) -> bool:
        return 0 <= self.at < self.seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if not func._schema.is_mutable and not func.is_view:
            self.seen += 1
            if self.seen == self.at + 1:
                raise torch.OutOfMemoryError(f"no room for {func}")
        return made


def within(allocator: Allocator, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `fn` with `allocator`."""

    def run(*args: Any) -> Any:
        with allocator:
            return fn(*args)

    return run


class Net(nn.Module):
    """A net with a checkpoint, dropout, a BatchNorm that only tracks, and a parameter that is used late."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5)
        self.late = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, is_last: bool) -> Tensor:
        self.calls = self.calls + 1  # a new tensor, not an in-place write
        x = x * self.late.sum() if self.use_reentrant else x  # it needs an input that requires a gradient
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.use_reentrant)
        self.norm(hidden.detach())
        out = self.second(nn.functional.dropout(hidden, 0.5))
        return (out * self.late if is_last else out).square().sum()


def batch(rank: int, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * rank + index)
    is_last = index == MICRO_BATCHES - 1
    return {"x": torch.randn(ITEMS, 3, generator=generator), "names": ["a"] * ITEMS, "is_last": is_last}


class Run:
    """A window that this rank can train repeatedly from the same state."""

    def __init__(self, kind: str) -> None:
        self.model = Net(use_reentrant=kind.endswith("-reentrant"))
        self.rank, _ = me()
        self.sync, self.forward = engine(
            kind.removesuffix("-reentrant"), self.model, accumulate=MICRO_BATCHES
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    def micro_batch(self, part: dict[str, Any]) -> tuple[Tensor, int]:
        assert len(part["names"]) == len(part["x"])
        return self.forward(part["x"], part["is_last"]), len(part["x"])

    def window(self, one: Callable[[int, dict[str, Any]], None]) -> list[Tensor]:
        """Train the window from its initial state with `one`; return parameters, buffers and random state."""
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
        """Train the window in blocks with a backward per part; `sizes` are part sizes by micro-batch."""

        def one(index: int, each: dict[str, Any]) -> None:
            starts = range(0, ITEMS, sizes[index])
            with self.sync.micro_batch(count=ITEMS):
                for start in starts:
                    part = each | {key: each[key][start : start + sizes[index]] for key in ("x", "names")}
                    # Not through DDP: buffers are broadcast after the last backward only.
                    self.model(part["x"], part["is_last"]).backward()

        return self.window(one)

    def failing(self, allocator: Allocator, at: int, *, fails: bool = True) -> list[Tensor]:
        """Train the window; if `fails`, memory runs out in micro-batch `at`."""

        def one(index: int, each: dict[str, Any]) -> None:
            if index != at or not fails:
                self.sync.retry_smaller(each, self.micro_batch)
                return
            backward = within(allocator, pe.MicroBatch.backward)
            with mock.patch.object(pe.MicroBatch, "backward", backward):
                self.sync.retry_smaller(each, within(allocator, self.micro_batch))

        return self.window(one)


def fit(part: Tensor, most: int, *, on: int | None = None) -> int:
    """Return the number of items in a part; run out of memory above `most`, on rank `on` or on all ranks."""
    if len(part) > most and on in (None, me()[0]):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")
    return len(part)


def assert_equal(got: list[Tensor], want: list[Tensor], *about: object) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), (index, *about)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        *[("own-native", 1), ("own-exact", 1), ("attach", 1)],
        *[
            pytest.param(kind, 2, marks=pytest.mark.slow)
            for kind in ("own-native", "own-exact", "attach-view")
        ],
        *rest(("own-native-reentrant", 1), ("own", 1), ("own", 2)),
        *rest(("attach", 2), ("attach-unused", 2), ("attach-static", 2)),
    ],
)
@on_ranks()
def test_memory_that_runs_out_at_any_operation_leaves_no_trace(kind):
    """The last rank fails; it ends with the same bits, dropout included, as blocks split by hand."""
    gc.freeze()  # each failure collects garbage, which takes half a second with torch's many objects
    run = Run(kind)
    fails = run.rank == me()[1] - 1
    for at in range(MICRO_BATCHES):
        sizes = [ITEMS if index < at or not fails else ITEMS // 2 for index in range(MICRO_BATCHES)]
        for _ in range(2):  # DDP's first window differs, because DDP then rebuilds its buckets
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


@pytest.mark.parametrize(
    ("kind", "world", "dtype"),
    [
        ("own", 2, torch.bfloat16),
        ("own-native", 3, torch.float32),
        ("own-exact", 2, torch.float32),
        ("attach", 2, torch.bfloat16),
        *rest(("own", 1, torch.float32), ("attach", 3, torch.float32)),
    ],
)
@on_ranks()
def test_micro_batches_that_never_fit_add_up_to_one_big_batch(kind, dtype):
    """Rank 0 has room for two items; its micro-batches hold 1 to 7, so that some are halved twice."""
    rank, world = me()
    model = Integers(dtype)
    sync, forward = engine(kind, model, accumulate=2)
    sync.scaler = pe.GradScaler("cpu", init_scale=8.0)  # scales the loss of each part once
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def items(r: int, k: int) -> int:
        return 1 + (r + 3 * k) % 7

    def loss_of(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if rank == 0 and len(part[0]) > 2:
            torch.empty(2**46, dtype=torch.uint8)  # more than any host has, so the allocator itself raises
        return forward(*part), torch.tensor(len(part[0]))

    sizes = []
    for number, window in enumerate(sync.windows(range(6))):
        for k in window:
            sync.retry_smaller(integers(10 * rank + k, items(rank, k)), loss_of)
            sizes.append(sync.part_size)
        sync.unscale_()
        members = [(r, k) for r in range(world) for k in (2 * number, 2 * number + 1)]
        batches = [integers(10 * r + k, items(r, k)) for r, k in members]
        assert_same(grads(model), mean_of_integers(model, batches, sum(items(*m) for m in members)))
        sync.step(optimizer)
    # Numbers of items: 1, then 4, which is halved to 2, then 7, 3, 6 and 2.
    assert sizes == ([None, 2, 2, 2, 2, 2] if rank == 0 else [None] * 6)


def _train_exactly(room: int) -> list[list[float]]:
    """Train two windows of four micro-batches over all ranks; memory holds `room` items."""
    rank, world = me()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    sync = pe.GradSync(model, accumulate=4 // world, accumulator=pe.Exact(micro_batches=4))
    data = torch.randn(2, world, 4 // world, 8, 3)
    for window in sync.windows(data[:, rank].flatten(0, 1)):
        for batch in window:
            sync.retry_smaller(batch, lambda part: (model(part).exp().sum(), fit(part, room)))
        sync.step(torch.optim.SGD(model.parameters(), lr=0.5))
    return [param.flatten().tolist() for param in model.parameters()]


def test_exact_sums_of_the_same_parts_have_the_same_bits_on_any_number_of_ranks(ranks):
    (alone,) = ranks(1).run(_train_exactly, 2)
    assert ranks(2).run(_train_exactly, 2) == [alone] * 2
    assert ranks(1).run(_train_exactly, 8) != [alone]  # other parts are rounded differently


@pytest.mark.parametrize(
    ("num", "large", "retries", "attempts"),
    [
        (16, 13, 3, [(0, 16), (0, 8), (8, 16), (8, 12), (12, 16), (12, 14), (14, 16)]),
        (3, 0, 1, [(0, 3), (0, 2), (2, 3)]),  # the larger half of an odd number comes first
        (7, 0, 2, [(0, 7), (0, 4), (0, 2), (2, 4), (4, 6), (6, 7)]),
    ],
)
@on_ranks(1)
def test_a_part_that_fails_is_halved_and_finished_ones_stay(num, large, retries, attempts):
    sync, seen = pe.GradSync(model := nn.Linear(1, 1), accumulate=1), []

    def loss_of(part: Tensor) -> tuple[Tensor, int]:
        seen.append((int(part[0]), int(part[-1]) + 1))
        if large in part and len(part) > 2:
            raise torch.OutOfMemoryError(f"{large} is large")
        return model(part).sum(), len(part)

    for window in sync.windows([torch.arange(float(num))[:, None]]):
        for x in window:
            sync.retry_smaller(x, loss_of)
        sync.unscale_()
    assert (seen, sync._engine.window.num_retries, sync.part_size) == (attempts, retries, 2)
    assert model.weight.grad.item() == pytest.approx((num - 1) / 2)


@on_ranks(2)
def test_an_item_that_does_not_fit_is_an_error_on_every_rank():
    model = Integers(torch.float32)
    sync = pe.GradSync(model, accumulate=1)
    for window in sync.windows([integers(0, 1)]):
        for each in window:
            error = error_of(sync.retry_smaller, each, lambda part: (model(*part), fit(part[0], 0, on=1)))
            assert ("1 item of a micro-batch does not fit" in error and "80 GiB" in error) == (me()[0] == 1)
            assert "rank 1: micro-batch 0 was left by an exception" in error_of(sync.flush)
            sync.abandon()
            break
        break
    with sync.accumulate():
        sync.backward(model(*integers(0)), count=1)
    sync.unscale_()


@on_ranks(1)
def test_the_activations_of_an_attempt_are_gone_before_the_next_one():
    model = nn.Linear(1, 1)
    sync = pe.GradSync(model, accumulate=1)
    alive: list[weakref.ref[Tensor]] = []

    def loss_of(part: Tensor) -> tuple[Tensor, int]:
        assert [each() for each in alive] == [None] * len(alive)
        hidden = model(part)
        alive.append(weakref.ref(hidden))
        return hidden.sum(), fit(part, 2)

    sync.retry_smaller(torch.ones(8, 1), loss_of)  # outside of a loop over windows, as with DDP
    sync.unscale_()
    assert len(alive) == 6
    assert model.weight.grad.item() == 1


@pytest.mark.parametrize("accumulator", ["native", "exact"])
@on_ranks(2)
def test_sparse_gradients_are_added_up_by_part(accumulator):
    table = nn.Embedding(5, 2, sparse=True)
    sync = pe.GradSync(table, accumulate=2, accumulator=accumulator)
    for window in sync.windows([torch.tensor([1, 2, 1, 4])] * 2):
        for rows in window:
            sync.retry_smaller(rows, lambda part: ((table(part) * part[:, None]).sum(), fit(part, 1, on=1)))
        sync.unscale_()
    # Of 16 rows over both ranks, eight are row 1 and four each rows 2 and 4; each is weighted by its index.
    assert table.weight.grad[:, 0].tolist() == [0, 8 / 16, 8 / 16, 0, 16 / 16]


@on_ranks(1)
def test_other_errors_of_the_function_pass_through():
    model = Integers(torch.float32)
    sync = pe.GradSync(model, accumulate=2)

    def loss_of(part: tuple[Tensor, Tensor]) -> None:
        model(*part).backward()
        raise ValueError("no label")

    for window in sync.windows([integers(0)] * 2):
        for one in window:
            with pytest.raises(ValueError, match="no label"):
                sync.retry_smaller(one, loss_of)
        with pytest.raises(ValueError, match="was left by an exception"):
            sync.flush()
        break
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_losses_with_counts_of_their_own_are_those_of_whole_micro_batches():
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=2)
    data = [torch.arange(8.0).reshape(4, 2) + number for number in range(2)]

    def losses_of(part: Tensor) -> dict[str, Tensor]:
        fit(part, 1, on=1)
        return {"all": model(part).sum(), "first": model(part)[part[:, 0] > 2].sum()}

    def count(batch: Tensor) -> dict[str, int]:
        return {"all": len(batch), "first": int((batch[:, 0] > 2).sum())}

    for window in sync.windows(data, count=count):
        for x in window:
            sync.retry_smaller(x, losses_of)
        sync.unscale_()
    everything = torch.cat(data)
    want = everything.mean(0) + everything[everything[:, 0] > 2].mean(0)
    # Sums of eight fp32 terms, each below 2^4.
    torch.testing.assert_close(model.weight.grad[0], want, rtol=0, atol=8 * 2**-20)
    assert sync.last_record is None


@on_ranks(2)
def test_slots_see_one_micro_batch():
    rank, _ = me()
    model = Integers(torch.float32)
    sync = pe.GradSync(model, accumulate=4, accumulator=pe.Exact(micro_batches=8, slots=4))

    def loss_of(part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return model(*part), fit(part[0], 2, on=1)

    for window in sync.windows([integers(10 * rank + k, 4) for k in range(4)]):
        for each in window:
            sync.part_size = None
            sync.retry_smaller(each, loss_of)
        sync.unscale_()
    batches = [integers(10 * r + k, 4) for r in range(2) for k in range(4)]
    assert_same(grads(model), mean_of_integers(model, batches, 4 * len(batches)))


@on_ranks(2)
def test_forwards_that_are_collective_are_refused_before_anything_has_run():
    chain = Chain()
    fully_shard(chain, mesh=init_device_mesh("cpu", (2,)))
    sharded = pe.attach(chain, accumulate=1)
    synced = pe.GradSync(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), accumulate=1)
    for sync, name in [(sharded, "FSDP2"), (synced, "module '1' is a SyncBatchNorm")]:
        for window in sync.windows([torch.ones(2, 2)]):
            for x in window:
                assert name in error_of(sync.retry_smaller, x, pytest.fail)
            break


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ((torch.ones(2), torch.ones(3)), ValueError, "tensors of sizes [2, 3] in dimension 0"),
        ({"number": 3}, ValueError, "no tensor with a dimension 0"),
        ((torch.ones(2), object()), TypeError, "holds a object: expected tensors"),
    ],
)
@on_ranks(1)
def test_a_batch_that_cannot_be_split_is_refused(wrong, kind, message):
    sync = pe.GradSync(nn.Linear(1, 1), accumulate=1)
    with sync.accumulate():
        with pytest.raises(kind, match=re.escape(message)):
            sync.retry_smaller(wrong, pytest.fail)
        sync.backward(sync._engine.module(torch.ones(1, 1)).sum(), count=1)
    sync.unscale_()  # the window is still complete


@on_ranks(1)
def test_wrong_arguments_are_named():
    sync = pe.GradSync(nn.Linear(1, 1), accumulate=1)
    x, forward = torch.ones(2, 1), sync._engine.module
    with pytest.raises(TypeError, match="fn is a Tensor: expected a function"):
        sync.retry_smaller(x, x)
    for size in (0, 2.0, True):
        with pytest.raises(ValueError, match="part_size=.*expected a whole number"):
            sync.part_size = size
    with sync.accumulate(), pytest.raises(TypeError, match=r"fn returned a Tensor: expected \(loss, count\)"):
        sync.retry_smaller(x, lambda part: forward(part).sum())
    sync.abandon()
    for window in sync.windows([x], count=len):
        for part in window:
            with pytest.raises(TypeError, match="fn returned a tuple, but this window's counts were read"):
                sync.retry_smaller(part, lambda part: (forward(part).sum(), len(part)))
        break


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["own", "own-native", "attach"])
def test_a_gpu_with_a_limit_trains_what_would_not_fit(ranks, kind):
    ranks(1).over("nccl").run(_train_within_a_limit, kind)


def _train_within_a_limit(kind: str) -> None:
    torch.manual_seed(0)
    # One item's hidden values take 8 MiB per layer.
    model = nn.Sequential(nn.Linear(1, 2**21), nn.Tanh(), nn.Linear(2**21, 1)).cuda()
    x = torch.linspace(-1, 1, 64, device="cuda")[:, None]
    params = list(model.parameters())
    want = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for part in x:
        for total, grad in zip(want, torch.autograd.grad(model(part).sum(), params), strict=True):
            total += grad / 64
    sync, forward = engine(kind, model, accumulate=2)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_allocated() + 2**28
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        for window in sync.windows([x, x]):
            for each in window:
                sync.retry_smaller(each, lambda part: (forward(part).sum(), len(part)))
            sync.unscale_()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sync.part_size is not None and sync.part_size < 64
    for total, param in zip(want, params, strict=True):
        # 128 fp32 additions of terms below 1, and products in TF32 if that is enabled.
        torch.testing.assert_close(param.grad.double(), total, rtol=2e-3, atol=128 * 2**-23)


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_an_audit_forgets_what_a_failed_attempt_has_brought(kind):
    """Rank 1's backward runs out of memory halfway, after the last layer's gradient."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    sync, forward = engine(kind, model, accumulate=2)
    sync.audit(every=1)
    optimizer, fails = torch.optim.SGD(model.parameters(), lr=0.1), [me()[0] == 1]

    def run_out(_: Tensor) -> None:
        if fails[0]:
            fails[0] = False
            raise torch.OutOfMemoryError("no room")

    def loss_of(part: Tensor) -> tuple[Tensor, int]:
        hidden = model[0](part) if kind == "own" else forward.module[0](part)
        hidden.register_hook(run_out)
        return model[1](hidden).sum(), len(part)

    for window in sync.windows([torch.ones(4, 3)] * 4):
        for x in window:
            sync.retry_smaller(x, loss_of)
        sync.step(optimizer)
