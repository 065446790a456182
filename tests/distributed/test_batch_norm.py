"""accumulator="exact" with BatchNorm: running statistics are the same bits for every world size too."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from cases import Collectives, me, recorded_warnings
from exact_cases import Cnn, digest, wrap
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe

STEPS = 2
# What is done with the same network; each is a function of the micro-batch, so each has to be invariant.
VARIANTS = (
    "plain",
    "mean",  # momentum=None: the mean over all batches
    "frozen",  # one BatchNorm in evaluation mode
    "untracked",  # one without running statistics
    "twice",  # one called twice in a forward
    "checkpoint",  # recomputed in the backward
    "half",  # statistics in bfloat16
)


def _build(variant: str) -> tuple[Cnn, Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if variant == "half" else torch.float32
    model = Cnn(variant).train().to(dtype)
    return model, torch.randn(1000, 3, 5, 5).mul_(2).add_(1).to(dtype)


def _train(kind: str, micro_batches: int, variant: str) -> list[tuple[str, str]]:
    """Train, and return digests after every step: of parameters and optimizer state, and of buffers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, data = _build(variant)
    # The last window is short, and so is its last micro-batch: with many ranks some have none there.
    size = 4 * micro_batches * STEPS - 4 * (micro_batches // 2) - 1
    sampler = pe.WindowSampler(size, seed=7, micro_batch=4, global_batch=4 * micro_batches)
    sync, forward = wrap(kind, model, 25, accumulate=sampler.accumulate, accumulator="exact")
    if variant == "compiled":
        forward = torch.compile(forward, backend="aot_eager", fullgraph=kind == "own")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digests = []
    for window in sync.windows(sampler):
        for rows in window:
            sync.backward(forward(data[rows]), count=len(rows))
        assert sync.step(optimizer)
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        digests.append((digest(*model.parameters(), *state), digest(*model.buffers())))
    assert len(digests) == STEPS
    if variant == "compiled" and kind == "own":
        # One for full micro-batches, one for the short one: none for a row, a window or a backward.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    return digests


_alone: dict[tuple, list[tuple[str, str]]] = {}


def _single(ranks, *case) -> list[tuple[str, str]]:
    if case not in _alone:
        _alone[case] = ranks(1).run(_train, "own", *case)[0]
    return _alone[case]


@pytest.mark.parametrize(
    ("kind", "world", "micro_batches", "variant"),
    [
        ("own", 2, 6, "plain"),
        ("own", 4, 3, "plain"),  # one rank never has a micro-batch
        ("attach", 3, 6, "plain"),
        ("fsdp", 3, 6, "plain"),
        *(("own", 3, 6, variant) for variant in VARIANTS[1:]),
        pytest.param("own", 3, 6, "compiled", marks=pytest.mark.slow),
    ],
)
def test_every_world_size_and_use_of_batch_norm_gives_the_same_bits(
    ranks, kind, world, micro_batches, variant
):
    alone = _single(ranks, micro_batches, variant)
    for digests in ranks(world).run(_train, kind, micro_batches, variant):
        assert digests == alone


@on_ranks(2)
def test_replayed_statistics_are_those_of_one_process_that_ran_everything():
    model, data = _build("twice")
    stock, batches = copy.deepcopy(model), list(data[:48].split(4))
    for x in batches:
        stock(x)
    rank, world = me()
    mine = batches[rank * 12 // world : (rank + 1) * 12 // world]
    sync = pe.GradSync(model, accumulate=len(mine), accumulator="exact")
    for window in sync.windows(mine):
        for x in window:
            sync.backward(model(x), count=4)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    for got, want in zip(model.buffers(), stock.buffers(), strict=True):
        # 24 updates of one rounding each, of values that stay below the largest one
        torch.testing.assert_close(got, want, rtol=0, atol=24 * 2**-24 * float(want.abs().max()))


def test_recomputation_does_not_count(ranks):
    assert _single(ranks, 6, "checkpoint") == _single(ranks, 6, "plain")


def _losses(loop: str, model: nn.Module, window: Iterator[Tensor]) -> Iterator[Tensor]:
    """Compute a window's losses, each before its backward at the latest."""
    if loop == "forwards first":
        yield from [model(x) for x in window]
    elif loop == "one ahead":
        ahead = next(window)
        while ahead is not None:
            x, ahead = ahead, next(window, None)
            yield model(x)
    else:
        for x in window:
            yield model(x)
            if loop == "again afterwards":
                with torch.no_grad():
                    model(x)


def _loops(loop: str) -> list[str]:
    model, data = _build("plain")
    rank, world = me()
    batches = list(data[: 24 * 4].split(4))
    share = 12 // world
    mine = [x for w in range(2) for x in batches[12 * w + rank * share : 12 * w + (rank + 1) * share]]
    sync = pe.GradSync(model, accumulate=share, accumulator="exact")
    optimizer, digests = torch.optim.SGD(model.parameters(), lr=0.1), []

    def end() -> None:
        sync.step(optimizer)
        digests.append(digest(*model.parameters(), *model.buffers()))

    if loop == "accumulate":
        for index, x in enumerate(mine, start=1):
            with sync.accumulate():
                sync.backward(model(x), count=4)
            if index % share == 0:
                end()
        return digests
    for window in sync.windows(mine):
        for loss in _losses(loop, model, window):
            sync.backward(loss, count=4)
        end()
    return digests


LOOPS = ["accumulate", "forwards first", "one ahead", "again afterwards"]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_way_to_loop_gives_the_same_bits(ranks, loop):
    alone = ranks(1).run(_loops, "plain")[0]
    for digests in ranks(2).run(_loops, loop):
        assert digests == alone


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("how", ["loop", "inside", "nan"])
@on_ranks(2)
def test_a_window_that_is_not_used_leaves_statistics_alone(how):
    model, data = _build("plain")
    sync = pe.GradSync(model, accumulate=2, accumulator="exact")
    before, optimizer = _buffers(model), torch.optim.SGD(model.parameters(), lr=0.1)
    identities = [id(buffer) for buffer in model.buffers()]
    with pytest.raises(KeyError):
        for window in sync.windows(data[:32].split(4)):
            for number, x in enumerate(window):
                if how == "inside":
                    model.norm.register_forward_hook(lambda *_: {}["gone"])
                loss = model(x)
                if how == "nan":
                    sync.backward(loss * float("nan"), count=4)
                    continue
                sync.backward(loss, count=4)
                assert _unchanged(model, before)
                if how == "loop" and number == 1:
                    raise KeyError(how)
            assert not sync.step(optimizer)
            raise KeyError(how)
    sync.abandon()
    assert _unchanged(model, before)
    assert identities == [id(buffer) for buffer in model.buffers()]


@on_ranks(1)
def test_outside_windows_and_in_copies_modules_do_as_they_always_do():
    model, data = _build("plain")
    twin = copy.deepcopy(model)
    left = pe.GradSync(nn.ModuleList([model.norm]), accumulate=1, accumulator="exact")
    for window in left.windows([None]):  # an engine that was given up in mid-window
        next(window)
        break
    left.close()
    sync = pe.GradSync(model, accumulate=1, accumulator="exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in sync.windows([data[:4]]):
        for x in window:
            sync.backward(model(x), count=4)
            ema = copy.deepcopy(model)
        sync.step(optimizer)
    assert not _unchanged(model, _buffers(twin))
    for other in (model, ema):
        twin.load_state_dict(other.state_dict())
        with torch.no_grad():
            other(data[4:8])
            twin(data[4:8])
        assert _unchanged(other, _buffers(twin))


@on_ranks(2)
def test_statistics_cost_one_collective_a_window():
    model, data = _build("plain")
    nums = []
    for source in (model, list(model.parameters())):
        with pe.GradSync(source, accumulate=2, accumulator="exact") as sync, Collectives() as seen:
            for window in sync.windows(data[:8].split(4)):
                for x in window:
                    sync.backward(model(x), count=4)
                sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        nums.append(len(seen.names))
    with_norm, without = nums
    assert with_norm == without + 1


def test_sync_batch_norm_is_refused_with_a_remedy():
    model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
    with pytest.raises(ValueError, match=r"1 is a SyncBatchNorm.*Use BatchNorm"):
        pe.GradSync(model, accumulate=1, accumulator="exact")


class Counts(nn.Module):
    """Has a buffer that counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("constant", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls is not None:
            self.calls += self.constant
        return self.norm(self.linear(x)).square().sum()


@pytest.mark.parametrize(
    ("accumulator", "counts", "num"), [("exact", True, 1), ("exact", False, 0), ("fp32", True, 0)]
)
def test_a_buffer_that_forwards_change_is_named_once(accumulator, counts, num):
    model = Counts()
    if not counts:
        model.calls = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded_warnings() as messages, pe.GradSync(model, accumulator=accumulator) as sync:
        for window in sync.windows(torch.randn(3, 4, 3)):
            for x in window:
                sync.backward(model(x))
            sync.step(optimizer)
    assert ["buffers calls." in message for message in messages if "exact" in message] == [True] * num
