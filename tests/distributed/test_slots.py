"""pe.Exact(slots=...): bits depend on the number of slots, but not on a number of ranks that divides it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from cases import Inject, engine, error_of, me, records_of
from exact_cases import digest, train_gpt, wrap
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe
from pyengine.gradients.bucket import Bucket
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

MICRO_BATCHES, SLOTS, SAMPLES = 12, 6, 2 * (2 * 12 - 5)  # the last window ends inside a slot


class Branches(nn.Module):
    """Layers used by all micro-batches, by those at even or odd places, by the one at place 5, or by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.2))
        self.even, self.odd, self.rare, self.none = (nn.Linear(9, 3) for _ in range(4))

    def forward(self, x: Tensor, place: int) -> Tensor:
        x = self.first(x)
        out = [self.odd(x)] if place % 2 else [self.even(x)]
        if place == 5:
            out.append(self.rare(x))
        return torch.cat(out).square().sum()


def _made(kind: str, model: nn.Module, accumulate: int, exact: pe.Exact) -> tuple[pe.Sync, nn.Module]:
    if kind in ("own", "fsdp"):
        return wrap(kind, model, 1e-4, accumulate=accumulate, accumulator=exact)
    return engine(kind, model, accumulate=accumulate, accumulator=exact)


def _train(kind: str, slots: int | None) -> list[str]:
    """Train two windows; return a digest of parameters, norm and loss after every step."""
    torch.manual_seed(0)
    model = Branches()
    data = torch.randn(SAMPLES, 7)
    sampler = pe.WindowSampler(SAMPLES, seed=7, micro_batch=2, global_batch=2 * MICRO_BATCHES)
    exact = pe.Exact(micro_batches=MICRO_BATCHES, slots=slots)
    sync, forward = _made(kind, model, sampler.accumulate, exact)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digests, losses = [], []
    sync.on_step(lambda record: losses.append(record.loss))
    for step, window in enumerate(sync.windows(sampler)):
        for rows in window:
            with pe.micro_batch_rng(7, step=step, index=sync.place):
                sync.backward(forward(data[rows], sync.place), count=len(rows))
        norm = sync.clip_grad_norm_(1.0)
        assert sync.step(optimizer)
        assert model.none.weight.grad is None
        loss = torch.tensor(losses[-1], dtype=torch.float64)
        digests.append(digest(*model.parameters(), norm, loss))
    sync.close()
    assert len(digests) == 2
    return digests


_alone: dict[int | None, list[str]] = {}


def _single(ranks, slots: int | None) -> list[str]:
    if slots not in _alone:
        (_alone[slots],) = ranks(1).run(_train, "own", slots)
    return _alone[slots]


@pytest.mark.parametrize(
    ("kind", "world"), [("own", 2), ("own", 3), ("attach", 3), ("attach-view", 2), ("attach-unused", 3)]
)
def test_every_world_size_that_divides_the_slots_gives_the_same_bits(ranks, world, kind):
    assert ranks(world).run(_train, kind, SLOTS) == [_single(ranks, SLOTS)] * world


def test_bits_depend_on_the_number_of_slots_and_a_micro_batch_a_slot_is_the_default(ranks):
    every = _single(ranks, None)
    assert ranks(2).run(_train, "attach", MICRO_BATCHES) == [every] * 2
    assert len({every[0], _single(ranks, SLOTS)[0], _single(ranks, 1)[0]}) == 3


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), ("hsdp", 4)])
def test_every_mesh_gives_the_same_bits(ranks, kind, world):
    case = torch.float32, 8, pe.Exact(8, slots=4)
    (alone,) = ranks(1).run(train_gpt, "own", *case)
    assert ranks(world).run(train_gpt, kind, *case) == [alone] * world


@pytest.mark.parametrize("num", [12, 7, 1])
def test_a_slot_is_what_pytorch_adds_up_and_slots_are_added_exactly(num):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3))
    data = torch.randn(num, 5, 40) * torch.logspace(-3, 3, num)[:, None, None]
    params = list(model.parameters())
    numel = sum(p.numel() for p in params)
    slots = []
    for begin in range(0, num, 3):
        model.zero_grad()
        for x in data[begin : begin + 3]:
            model(x).square().sum().backward()
        slots.append(torch.cat([p.grad.flatten() for p in params]))
    plan = BucketPlan([0], [numel])
    total = ExactSum(plan, numel=-(-numel // 64) * 64, terms=4, device=torch.device("cpu"))
    for index, slot in enumerate(reversed(slots)):
        total.deposit_([slot], first=index == 0, nonfinite=torch.zeros(1, dtype=torch.uint8))
    expected = torch.zeros(total.hi.numel())
    total.round_(expected)
    # Each block of 64 elements chooses its own grid. Blocks here differ from those of the buckets, but limbs
    # have 29 bits each, so that both round the same exact sum.
    sync = pe.GradSync(model, accumulate=12, accumulator=pe.Exact(12, slots=4))
    for index, x in enumerate(data):
        with sync.accumulate(last=index == num - 1):
            sync.backward(model(x).square().sum(), count=int(index == 0))
    sync.unscale_()
    assert torch.equal(torch.cat([p.grad.flatten() for p in params]), expected[:numel])


@pytest.mark.parametrize(("slots", "deposits"), [(None, 12), (12, 6), (2, 1)])
@on_ranks(2)
def test_a_window_costs_one_deposit_a_slot(slots, deposits):
    """Deposits in the one bucket are counted in a window of 24 micro-batches, after a first window."""
    _, world = me()
    model = nn.Linear(3, 2)
    sync = pe.GradSync(model, accumulate=24 // world, accumulator=pe.Exact(24, slots=slots))
    nums = []
    for _ in range(2):
        with mock.patch.object(Bucket, "_accumulate", autospec=True, side_effect=Bucket._accumulate) as store:
            for _ in range(24 // world):
                with sync.accumulate():
                    sync.backward(model(torch.ones(1, 3)).sum())
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        nums.append(store.call_count)
    assert nums[-1] == deposits


BY_RANK = {"slots": [24, 12, 12], "accumulate": [8, 24, 8]}


@pytest.mark.parametrize(
    ("slots", "options", "needles"),
    [
        (5, {}, ["Exact(micro_batches=24, slots=5): all slots need the same number", "slots=4 does"]),
        (36, {}, ["slots=36): all slots need the same number", "slots=24 does"]),
        (8, {}, ["slots=8) on 3 ranks", "slots can be divided among 1, 2, 4, 8 ranks"]),
        (0, {}, ["slots=0): expected a whole number of slots"]),
        (2.5, {}, ["slots=2.5): expected a whole number of slots"]),
        ("by rank", {}, ["rank 0 has", "slots=24)", "slots=12)"]),
        (
            12,
            {"accumulate": "by rank"},
            ["accumulate=[8, 24, 8] by rank: every rank gets 4 whole slots of 2"],
        ),
        (12, {"dtype": torch.bfloat16}, ["parameter 'weight' is torch.bfloat16", "leave slots out"]),
    ],
    ids=str,
)
@on_ranks(3)
def test_what_slots_cannot_have_is_refused_by_name_on_every_rank(slots, options, needles):
    rank, _ = me()
    options = {"accumulate": 8, "slots": slots, **options}
    options = {name: BY_RANK[name][rank] if value == "by rank" else value for name, value in options.items()}
    model = nn.Linear(2, 1, dtype=options.pop("dtype", None))
    exact = pe.Exact(micro_batches=24, slots=options.pop("slots"))
    message = error_of(pe.GradSync, model, accumulator=exact, **options)
    assert all(needle in message for needle in needles), message


@pytest.mark.parametrize("is_silent", [True, False])
@on_ranks(2)
def test_a_backward_out_of_turn_is_an_error_on_every_rank_and_the_next_window_clean(is_silent):
    """Rank 1 reads two micro-batches before a backward; this is no error with an empty block between them."""
    rank, _ = me()
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=4, accumulator=pe.Exact(8, slots=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(skips: bool) -> None:
        for window in sync.windows([torch.ones(1, 2)] * 4):
            for number, x in enumerate(window):
                if rank == 1 and number == 0 and skips:
                    continue
                if rank == 1 and number == 0 and not is_silent:
                    with sync.micro_batch(count=0):
                        pass
                    continue
                sync.backward(model(x).sum())
            sync.step(optimizer)

    message = error_of(run, is_silent)
    if is_silent:
        assert "rank 1: micro-batches of window 0 were read before the backwards" in message
        assert message.count("were read before") == 1
        message = error_of(run, False)
    assert message == "no error"


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_report_names_the_micro_batches_of_a_slot(kind):
    rank, _ = me()
    model = nn.Linear(2, 1)
    sync, forward = _made(kind, model, 4, pe.Exact(8, slots=4))
    records = records_of(sync)
    for number in range(4):
        with sync.accumulate():
            out = forward(torch.ones(1, 2))
            value = float("inf") if (rank, number) == (1, 2) else 1.0
            sync.backward(Inject.apply(out, value).sum())
    assert not sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    sync.close()
    assert "from rank 1, micro-batch 2; rank 1, micro-batch 3; or from a finite value" in records[0].reason


def _four_of_six(kind: str, *, flushes: bool) -> Tensor:
    """Return the gradient of a window whose last slot has one micro-batch of three.

    The window ends with its last backward, or with a flush, which runs no backward.
    """
    torch.manual_seed(0)
    model, data = nn.Linear(40, 3), torch.randn(4, 2, 40) * torch.logspace(0, 3, 4)[:, None, None]
    sync, forward = _made(kind, model, 6, pe.Exact(6, slots=2))
    for index, x in enumerate(data):
        with sync.accumulate(last=index == 3 and not flushes):
            sync.backward(forward(x).square().sum(), count=int(index == 0))
    if flushes:
        sync.flush()
    sync.unscale_()
    grads = [p.grad.full_tensor() if kind == "fsdp" else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("kind", ["own", "attach", "fsdp"])
def test_what_a_flush_leaves_of_a_slot_is_one_term(ranks, kind):
    (flushed,) = ranks(1).run(_four_of_six, kind, flushes=True)
    (whole,) = ranks(1).run(_four_of_six, "own", flushes=False)
    assert torch.equal(flushed, whole)
