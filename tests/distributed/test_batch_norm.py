"""accumulator="exact" with BatchNorm: running statistics are the same bits for every world size too."""

from __future__ import annotations

import copy
import hashlib
import warnings

import pytest
import torch
from cases import Collectives, me
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pyengine as pe

STEPS = 3
# What is done with the same network; each is a function of the micro-batch, so each has to be invariant.
VARIANTS = (
    "plain",
    "mean",  # momentum=None: the mean over all batches
    "frozen",  # one BatchNorm in evaluation mode
    "untracked",  # one without running statistics
    "twice",  # one called twice in a forward
    "checkpoint",  # recomputed in the backward
    "half",  # statistics in bfloat16
    "compiled",
)


class Cnn(nn.Module):
    """Convolutions in front of BatchNorms, of sizes that are not round; called with images,
    returns a summed loss.
    """

    def __init__(self, variant: str = "plain") -> None:
        super().__init__()
        self.variant = variant
        options = {"momentum": None} if variant == "mean" else {"momentum": 0.3}
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7, **options), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(7, 7, 3, padding=1), nn.BatchNorm2d(7, **options), nn.ReLU())
        track = variant != "untracked"
        self.norm = nn.BatchNorm1d(7, track_running_stats=track, **options)
        self.head = nn.Linear(7, 5)

    def train(self, mode: bool = True) -> Cnn:
        """Keep the frozen one frozen."""
        super().train(mode)
        if self.variant == "frozen":
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the summed loss of telling which channel mean is largest."""
        target = x.float().mean((2, 3)).argmax(1)
        h = self.stem(x)
        if self.variant == "checkpoint":
            h = checkpoint(self.block, h, use_reentrant=False)
        else:
            h = self.block(h)
        if self.variant == "twice":
            h = self.block(h)
        logits = self.head(self.norm(h.mean((2, 3))))
        return nn.functional.cross_entropy(logits.float(), target, reduction="sum")


def _digest(*tensors: Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        sha.update(whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _build(variant: str) -> tuple[Cnn, Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if variant == "half" else torch.float32
    model = Cnn(variant).train().to(dtype)
    return model, torch.randn(1000, 3, 5, 5).mul_(2).add_(1).to(dtype)


def _wrap(kind: str, model: nn.Module, **options: object) -> tuple[pe.Sync, nn.Module]:
    if kind == "own":
        return pe.GradSync(model, **options), model
    if kind == "fsdp":
        fully_shard(model)
        return pe.attach(model, **options), model
    ddp = DistributedDataParallel(model)
    return pe.attach(ddp, **options), ddp


def _train(kind: str, micro_batches: int, variant: str) -> list[tuple[str, str]]:
    """Train, and return digests after every step: of parameters and optimizer state, and of buffers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, data = _build(variant)
    # The last window is short, and so is its last micro-batch: with many ranks some have none there.
    size = 4 * micro_batches * STEPS - 4 * (micro_batches // 2) - 1
    sampler = pe.WindowSampler(size, seed=7, micro_batch=4, global_batch=4 * micro_batches)
    sync, forward = _wrap(kind, model, accumulate=sampler.accumulate, accumulator="exact")
    if variant == "compiled":
        forward = torch.compile(forward, backend="aot_eager", fullgraph=kind == "own")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digests = []
    for window in sync.windows(sampler):
        for rows in window:
            sync.backward(forward(data[rows]), count=len(rows))
        assert sync.step(optimizer)
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        digests.append((_digest(*model.parameters(), *state), _digest(*model.buffers())))
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
    ("kind", "world", "micro_batches"),
    [
        ("own", 2, 12),
        ("own", 4, 3),  # one rank never has a micro-batch
        ("attach", 3, 12),
        ("fsdp", 3, 12),
    ],
)
def test_every_world_size_gives_the_same_bits(ranks, kind, world, micro_batches):
    alone = _single(ranks, micro_batches, "plain")
    for digests in ranks(world).run(_train, kind, micro_batches, "plain"):
        assert digests == alone


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.slow) if v == "compiled" else v for v in VARIANTS[1:]]
)
def test_every_use_of_batch_norm_gives_the_same_bits(ranks, variant):
    alone = _single(ranks, 8, variant)
    for digests in ranks(3).run(_train, "own", 8, variant):
        assert digests == alone


def _statistics_only(learning: bool) -> list[Tensor]:
    """Return the buffers after a window at unchanged parameters, or those of stock PyTorch."""
    model, data = _build("twice")
    batches = list(data[:48].split(4))
    if not learning:
        for x in batches:
            model(x)
        return list(model.buffers())
    rank, world = me()
    mine = batches[rank * 12 // world : (rank + 1) * 12 // world]
    sync, forward = _wrap("own", model, accumulate=len(mine), accumulator="exact")
    for window in sync.windows(mine):
        for x in window:
            sync.backward(forward(x), count=4)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    return list(model.buffers())


def test_replayed_statistics_are_those_of_one_process_that_ran_everything(ranks):
    stock = ranks(1).run(_statistics_only, False)[0]
    for got, want in zip(ranks(2).run(_statistics_only, True)[0], stock, strict=True):
        # 24 updates of one rounding each, of values that stay below the largest one
        torch.testing.assert_close(got, want, rtol=0, atol=24 * 2**-24 * float(want.abs().max()))


def test_recomputation_does_not_count(ranks):
    assert _single(ranks, 8, "checkpoint") == _single(ranks, 8, "plain")


def _loops(loop: str) -> list[str]:
    model, data = _build("plain")
    rank, world = me()
    batches = list(data[: 24 * 4].split(4))
    share = 12 // world
    mine = [x for w in range(2) for x in batches[12 * w + rank * share : 12 * w + (rank + 1) * share]]
    sync, optimizer = (
        pe.GradSync(model, accumulate=share, accumulator="exact"),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    digests = []

    def end() -> None:
        sync.step(optimizer)
        digests.append(_digest(*model.parameters(), *model.buffers()))

    if loop == "accumulate":
        for x in mine:
            with sync.accumulate():
                sync.backward(model(x), count=4)
                is_end = sync.is_sync_step
            if is_end:
                end()
        return digests
    for window in sync.windows(mine):
        if loop == "forwards first":
            for loss in [model(x) for x in window]:
                sync.backward(loss, count=4)
        elif loop == "handed out first":
            for x in list(window):
                sync.backward(model(x), count=4)
        elif loop == "one ahead":
            ahead = next(window)
            while ahead is not None:
                x, ahead = ahead, next(window, None)
                sync.backward(model(x), count=4)
        elif loop == "interleaved":
            for x in window:
                losses = [model(x), model(next(window))]
                for loss in losses:
                    sync.backward(loss, count=4)
        elif loop == "again afterwards":
            for x in window:
                sync.backward(model(x), count=4)
                with torch.no_grad():
                    model(x)
        else:
            for x in window:
                sync.backward(model(x), count=4)
        end()
    return digests


LOOPS = ["accumulate", "forwards first", "handed out first", "one ahead", "interleaved", "again afterwards"]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_way_to_loop_gives_the_same_bits(ranks, loop):
    alone = ranks(1).run(_loops, "plain")[0]
    for digests in ranks(2).run(_loops, loop):
        assert digests == alone


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def _abandoned(how: str) -> None:
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


@pytest.mark.parametrize("how", ["loop", "inside", "nan"])
def test_a_window_that_is_not_used_leaves_statistics_alone(ranks, how):
    ranks(2).run(_abandoned, how)


def _outside_windows() -> None:
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


def test_outside_windows_and_in_copies_modules_do_as_they_always_do(ranks):
    ranks(1).run(_outside_windows)


def _traffic(norm: bool) -> int:
    model, data = _build("plain")
    source = model if norm else list(model.parameters())
    sync = pe.GradSync(source, accumulate=2, accumulator="exact")
    for window in sync.windows(data[:8].split(4)):
        with Collectives() as seen:
            for x in window:
                sync.backward(model(x), count=4)
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    return len(seen.names)


def test_statistics_cost_one_collective_a_window(ranks):
    with_norm, without = (ranks(2).run(_traffic, norm)[0] for norm in (True, False))
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
        """Return a loss."""
        if self.calls is not None:
            self.calls += self.constant
        return self.norm(self.linear(x)).square().sum()


def _warnings(accumulator: str, counts: bool) -> list[str]:
    model = Counts()
    if not counts:
        model.calls = None
    sync = pe.GradSync(model, accumulate=1, accumulator=accumulator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for window in sync.windows(torch.randn(3, 4, 3)):
            for x in window:
                sync.backward(model(x))
            sync.step(optimizer)
    return [str(warning.message) for warning in caught if "exact" in str(warning.message)]


def test_a_buffer_that_forwards_change_is_named_once(ranks):
    (message,) = ranks(1).run(_warnings, "exact", True)[0]
    assert "buffers calls." in message


@pytest.mark.parametrize(("accumulator", "counts"), [("exact", False), ("fp32", True)])
def test_other_buffers_are_not_warned_of(ranks, accumulator, counts):
    assert ranks(1).run(_warnings, accumulator, counts)[0] == []
