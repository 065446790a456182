"""A damaged state is refused on every rank; nothing changes, and a good one still loads."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from damages import ANY_STATE, EXACT, HIDDEN, OUTSIDE
from ranks import on_ranks
from states import content, flat
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.checkpoint.checksum import checksum
from pyengine.data.rng import rank_and_world_size

KINDS = ("own", "narrow", "exact", "attach")


class _Model(nn.Module):
    """Parameters of odd sizes, a BatchNorm, and one parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))).float().square().sum()


def _make(kind: str) -> tuple[pe.Sync, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model = _Model().to(torch.bfloat16 if kind == "narrow" else torch.float32)
    dtype = next(model.parameters()).dtype
    accumulator = "exact" if kind == "exact" else "fp32"
    if kind == "attach":
        model = DistributedDataParallel(model, broadcast_buffers=False)
        sync: pe.Sync = pe.attach(model, accumulate=3)
    else:
        sync = pe.GradSync(model, accumulate=3, accumulator=accumulator, bucket_cap_mb=1e-4)
    sync.scaler = pe.GradScaler("cpu", init_scale=4.0)

    def loss(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * index + rank_and_world_size()[0])
        return model(torch.randn(4, 3, generator=generator).to(dtype))

    return sync, loss


def _train(sync: pe.Sync, loss: Callable[[int], Tensor], batches: range, *, to: int) -> None:
    """Run micro-batches up to `to`; what a window leaves in `.grad` is kept, and counts into the next one."""
    for index in batches[: to - batches.start]:
        with sync.accumulate():
            sync.backward(loss(index), count=4)
            if sync.is_sync_step:
                sync.unscale_()


_files: dict[tuple[str, int, int], bytes] = {}


def _file(kind: str) -> bytes:
    case = (kind, *rank_and_world_size())
    if case not in _files:
        sync, loss = _make(kind)
        _train(sync, loss, range(6), to=5)
        file = io.BytesIO()
        torch.save(sync.state_dict(), file)
        _files[case] = file.getvalue()
    return _files[case]


def _interrupted(kind: str) -> dict[str, Any]:
    return torch.load(io.BytesIO(_file(kind)), weights_only=True)


def _everything(sync: pe.Sync) -> int:
    """Sum up all that loading could change: position, sums, counts, order, carry, scaler, generators."""
    grads = [param.grad for param in sync._engine.reducer.params]
    return checksum([content(sync.state_dict()), grads, sync.window, sync.due])


def _message(sync: pe.Sync, states: Any) -> str:
    """Return what loading is refused with; nothing may have changed."""
    before = _everything(sync)
    with pytest.raises(ValueError) as caught:
        sync.load_state_dict(states)
    assert _everything(sync) == before
    return str(caught.value)


def _goes_on(kind: str, sync: pe.Sync, loss: Callable[[int], Tensor], state: dict[str, Any]) -> bool:
    """Load a state, end its window, and compare with a run that nobody has interrupted."""
    whole, its_loss = _make(kind)
    _train(whole, its_loss, range(6), to=6)
    sync.load_state_dict(state)
    _train(sync, loss, range(5, 6), to=6)
    ends = [[p.grad for p in one._engine.reducer.params] for one in (sync, whole)]
    return checksum(ends[0]) == checksum(ends[1])


CASES = [
    *(("own", name) for name in ANY_STATE),
    *((kind, name) for kind in KINDS[1:] for name in ANY_STATE if "sum" in name or "flags" in name),
    *(("exact", name) for name in EXACT),
]


@functools.cache
def _kept(kind: str) -> pe.Sync:
    """Return one engine for all states that it refuses, which leave it as it is."""
    return _make(kind)[0]


def _alone(ranks: Any, fn: Callable[..., Any], kind: str, *args: Any) -> Any:
    """Run something on one rank; only DDP wants a process group for that."""
    return ranks(1).run(fn, kind, *args)[0] if kind == "attach" else fn(kind, *args)


def _refused(kind: str, name: str, version: int) -> str:
    state = _interrupted(kind)
    spoilt = flat(state) if version == 1 else state
    {**ANY_STATE, **EXACT, **HIDDEN}[name](spoilt if version == 1 else content(spoilt))
    return _message(_make(kind)[0] if kind == "attach" else _kept(kind), spoilt)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_no_engine_would_have_saved_is_refused_even_without_a_checksum(ranks, kind, name):
    message = _alone(ranks, _refused, kind, name, 1)
    assert message.startswith(("state", "parameters differ")) and "cannot be read" not in message


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("own", name) for name in HIDDEN), *((kind, "two sums exchanged") for kind in KINDS[1:])],
)
def test_what_was_changed_after_it_was_saved_is_refused(ranks, kind, name):
    message = _alone(ranks, _refused, kind, name, 2)
    assert "state of rank 0 of 1 was damaged or changed after it was saved" in message


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_stands_round_the_part_of_a_rank_is_checked_too(name):
    state = _interrupted("own")
    OUTSIDE[name](state)
    message = _message(_kept("own"), state)
    assert message.startswith("state") and message.isprintable()


def _flipped_tensors(kind: str) -> int:
    state = _interrupted(kind)
    sync, _ = _make(kind)
    tensors = list(_tensors(content(state)))
    for number, tensor in enumerate(tensors):
        memory = tensor.view(-1).view(torch.uint8)
        at, bit = random.Random(number).randrange(len(memory)), 1 << number % 8
        memory[at] ^= bit
        assert "damaged or changed" in _message(sync, state)
        memory[at] ^= bit
    sync.load_state_dict(state)
    return len(tensors)


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


@pytest.mark.parametrize("kind", ["exact", "attach"])
def test_a_flipped_bit_of_any_tensor_is_refused(ranks, kind):
    assert _alone(ranks, _flipped_tensors, kind) > 8


# Several ranks.

ON_ONE_RANK = ("sums=None", "carry=None", "a place twice", "torch's generator is short", "a sum deleted")


# No form of a state says that a sum is missing: only the checksum of version 2.
@pytest.mark.parametrize(
    ("kind", "version", "name"),
    [*(("own", 1, name) for name in ON_ONE_RANK[:-1]), *((kind, 2, ON_ONE_RANK[-1]) for kind in KINDS)],
)
@on_ranks(2)
def test_what_one_rank_cannot_load_no_rank_loads(kind, version, name):
    state = _interrupted(kind)
    spoilt = copy.deepcopy(state)
    if rank_and_world_size()[0] == 1:
        spoilt = flat(spoilt) if version == 1 else spoilt
        {**ANY_STATE, **HIDDEN}[name](spoilt if version == 1 else content(spoilt))
    sync, loss = _make(kind)
    _train(sync, loss, range(2), to=1)
    sync.abandon()
    assert "rank 1: state" in _message(sync, spoilt)
    assert _goes_on(kind, sync, loss, state)


@on_ranks(2)
def test_a_damaged_state_in_one_rank_s_list_stops_every_rank():
    """Give both ranks the states of both; in rank 0's list, rank 1's is damaged."""
    everybody: list[Any] = [None] * 2
    state = _interrupted("exact")
    torch.distributed.all_gather_object(everybody, state)
    spoilt = copy.deepcopy(everybody)
    if rank_and_world_size()[0] == 0:
        ANY_STATE["sums=None"](content(spoilt[1]))
    sync, loss = _make("exact")
    assert "rank 0: state of rank 1 of 2 was damaged or changed" in _message(sync, spoilt)
    assert _goes_on("exact", sync, loss, everybody)


@on_ranks(2)
def test_a_micro_batch_that_two_ranks_claim_is_refused():
    state = _interrupted("own")
    spoilt = flat(state)
    if rank_and_world_size()[0] == 1:
        spoilt["places"] = [0, 1]  # rank 0's
    assert "hold a micro-batch twice" in _message(_make("own")[0], spoilt)


@pytest.mark.parametrize("kind", ["exact", "attach"])
@on_ranks(2)
def test_a_state_of_version_1_loads(kind):
    sync, loss = _make(kind)
    assert _goes_on(kind, sync, loss, flat(_interrupted(kind)))


def test_a_state_is_not_written_to_by_the_run_that_goes_on_from_it():
    state = _interrupted("own")
    sync, loss = _make("own")
    sync.load_state_dict(state)
    _train(sync, loss, range(5, 6), to=6)
    for param in sync._engine.reducer.params:
        if param.grad is not None:
            param.grad.zero_()
    assert _goes_on("own", sync, loss, state)


def test_a_state_that_holds_itself_is_refused_and_not_followed_for_ever():
    state = _interrupted("own")
    own = state["rank 0 of 1"][0]
    own["carry"] = {"x": own}
    assert "one in itself" in _message(_make("own")[0], state)
