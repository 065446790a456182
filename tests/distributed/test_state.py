"""Runs that stop between two micro-batches and go on from their states: alone, or on another world size."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import Integers, error_of, integers, me
from exact_cases import Cnn, Gpt, digest, wrap
from marks import rest
from ranks import on_ranks
from states import changed, content
from torch import nn

import pyengine as pe

MICRO_BATCHES, WINDOWS, LAST = 8, 3, 6  # the last window is short


def _images(rows: list[int]) -> torch.Tensor:
    return torch.randn(100, 3, 5, 5, generator=torch.Generator().manual_seed(1))[rows]


def _tokens(rows: list[int]) -> torch.Tensor:
    return torch.randint(0, 50, (100, 9), generator=torch.Generator().manual_seed(1))[rows]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[list[int]], torch.Tensor]]] = {
    "gpt": (lambda: Gpt(torch.float32), _tokens),
    "gpt in bf16": (lambda: Gpt(torch.bfloat16), _tokens),
    "cnn": (lambda: Cnn().train(), _images),
}


def _pack(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


class _Run:
    """A model in training; `checkpoint` and `sync` states travel as bytes, as through files."""

    def __init__(self, kind: str, name: str, *, from_: bytes = b"") -> None:
        make, self._data = MODELS[name]
        torch.manual_seed(0)
        self.model = make()
        self.sampler = pe.WindowSampler(
            2 * MICRO_BATCHES * WINDOWS - 4, seed=7, micro_batch=2, global_batch=2 * MICRO_BATCHES
        )
        if from_:
            self.model.load_state_dict(_unpack(from_)["model"])
        exact = pe.Exact(micro_batches=MICRO_BATCHES)
        self.sync, self.forward = wrap(
            kind, self.model, 0.01, accumulate=self.sampler.accumulate, accumulator=exact
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if from_:
            self.optimizer.load_state_dict(_unpack(from_)["optimizer"])
        self.losses: list[float | None] = []
        self.sync.on_step(lambda record: self.losses.append(record.loss))

    def backward(self, rows: list[int], step: int) -> None:
        with pe.micro_batch_rng(7, step=step, index=self.sync.place):
            self.sync.backward(self.forward(self._data(rows)), count=len(rows))

    def step(self) -> None:
        self.sync.clip_grad_norm_(1.0)
        self.sync.step(self.optimizer)

    def checkpoint(self) -> bytes:
        return _pack({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def digest(self) -> tuple[str, list[float | None]]:
        state = [v for p in self.model.parameters() for v in self.optimizer.state[p].values()]
        return digest(*self.model.parameters(), *self.model.buffers(), *state), self.losses


def _undisturbed(name: str) -> tuple[str, list[float | None]]:
    run = _Run("own", name)
    for step, window in enumerate(run.sync.windows(run.sampler)):
        for rows in window:
            run.backward(rows, step)
        run.step()
    return run.digest()


def _stop(
    kind: str, name: str, at: int, states: Sequence[bytes] = (), checkpoint: bytes = b""
) -> tuple[bytes, bytes]:
    """Begin, or go on, and stop in window `at`, each rank after another number of micro-batches."""
    rank, _ = me()
    # DDP has a collective before the first forward of its second window.
    stop = max((rank + 1) % 3, kind == "attach")
    run = _Run(kind, name, from_=checkpoint)
    _resume(run, states)
    saved, state = run.checkpoint(), run.sync.state_dict()
    for step, window in enumerate(run.sync.windows(run.sampler), start=run.sampler.window):
        if step == at and not run.sampler._share(at):
            return _together(saved, _pack(state))  # this rank has nothing in the short last window
        for position, rows in enumerate(window):
            if step == at and (position == stop or run.sync.is_sync_step):
                return _together(saved, _pack(state))
            run.backward(rows, step)
            if step == at:
                state = run.sync.state_dict()
        run.step()
        saved, state = run.checkpoint(), run.sync.state_dict()
    raise AssertionError("it was to stop")


def _together(*values: bytes) -> Any:
    torch.distributed.barrier()  # a group whose collective is not over for somebody must not be left
    return values


def _resume(run: _Run, states: Sequence[bytes]) -> None:
    if states:
        loaded = [_unpack(state) for state in states]
        run.sync.load_state_dict(loaded[::-1] if me()[0] else loaded)  # in any order
        run.sampler.set_epoch(0, window=loaded[0]["window"], due=run.sync.due)


def _go_on(
    kind: str, name: str, states: list[bytes], checkpoint: bytes
) -> tuple[tuple[str, list[float | None]], list[int]]:
    run = _Run(kind, name, from_=checkpoint)
    _resume(run, states)
    places: list[int] = []
    for number, window in enumerate(run.sync.windows(run.sampler)):
        for rows in window:
            if number == 0:
                places.append(run.sync.place)
            run.backward(rows, run.sampler.window + number)
        run.step()
    return run.digest(), places


_alone: dict[str, tuple[str, list[float | None]]] = {}


def _chain(ranks, kind: str, name: str, stops: list[tuple[int, int]], last: int) -> None:
    """Stop on so many ranks in such a window, again and again; go on to the end on `last` ranks."""
    if name not in _alone:
        (_alone[name],) = ranks(1).run(_undisturbed, name)
    digest, losses = _alone[name]
    states, checkpoint, before = [], b"", -1
    for world, at in stops:
        stopped = ranks(world).run(_stop, kind, name, at, states, checkpoint)
        if at != before:
            checkpoint, states = stopped[0][0], []
        states, before = [*states, *(state for _, state in stopped)], at
    done = {place for state in states for place in content(_unpack(state))["places"]}
    ended = ranks(last).run(_go_on, kind, name, states, checkpoint)
    for (end, later), _ in ended:
        assert (end, later) == (digest, losses[-len(later) :])
    computed = [place for _, places in ended for place in places]
    assert done and sorted([*computed, *done]) == list(range(LAST))


END = WINDOWS - 1


@pytest.mark.parametrize(
    ("kind", "name", "world", "last"),
    [
        ("own", "gpt", 4, 1),
        ("attach", "gpt", 1, 3),
        ("own", "cnn", 3, 2),  # running statistics go on, too
        ("own", "gpt in bf16", 1, 3),
        *rest(("own", "gpt", 2, 4)),
    ],
)
def test_exact_sums_go_on_in_mid_window_on_any_world_size(ranks, kind, name, world, last):
    _chain(ranks, kind, name, [(world, END)], last)


@pytest.mark.parametrize(("kind", "first"), [("own", END - 1), ("attach", END)])
def test_a_run_that_went_on_in_mid_window_can_stop_again_in_the_same_one_or_a_later(ranks, kind, first):
    _chain(ranks, kind, "gpt", [(4, first), (3, END)], 1)


def _first_window(kind: str, states: Sequence[bytes], stop: int | None) -> Any:
    """Train the first window, or the rest of it; return its end, or the state after `stop` micro-batches."""
    run = _Run(kind, "gpt")
    _resume(run, states)
    for window in run.sync.windows(run.sampler):
        for position, rows in enumerate(window, start=1):
            run.backward(rows, 0)
            if position == stop:
                return _together(_pack(run.sync.state_dict()))[0]
        run.step()
        break
    return run.digest()


@pytest.mark.parametrize(
    ("stopped", "ended"), [("fsdp 2", "own 3"), ("attach 2", "hsdp 4"), ("fsdp 2", "fsdp 3")]
)
def test_exact_sums_go_on_over_another_owner_of_the_gradients(ranks, stopped, ended):
    (kind, world), (last, number) = stopped.split(), ended.split()
    alone = ranks(1).run(_first_window, "own", [], None)[0]
    states = ranks(int(world)).run(_first_window, kind, [], 2)
    assert ranks(int(number)).run(_first_window, last, states, None) == [alone] * int(number)


# The same ranks, each with its own state: any accumulator.


@pytest.mark.parametrize(
    ("kind", "accumulator", "dtype", "how"),
    [
        ("own", "fp32", torch.float32, "an engine in DCP"),
        ("own", "native", torch.float32, "torch.save"),
        ("own", "exact", torch.bfloat16, "a state in DCP"),
        ("attach", "fp32", torch.bfloat16, "a state in DCP"),
        ("attach", "exact", torch.float32, "torch.save"),
    ],
)
@on_ranks(2)  # DDP lays its buckets out anew, and the order in a ring of more ranks depends on that
def test_ranks_go_on_with_their_own_states_and_generators_bit_for_bit(
    tmp_path, kind, accumulator, dtype, how
):
    """Stop in the second window of a model with dropout, under a loss scale that grows."""
    rank, _ = me()
    file, folder = tmp_path / f"{rank}.pt", str(tmp_path / "checkpoint")

    def made() -> tuple[pe.Sync, nn.Module, nn.Module]:
        torch.manual_seed(rank)
        model = Gpt(dtype)
        sync, forward = wrap(kind, model, 0.01, accumulate=3, accumulator=accumulator)
        sync.scaler = pe.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        return sync, forward, model

    def run(places: range) -> tuple[str, float]:
        for place in places:
            with sync.accumulate():
                sync.backward(forward(_tokens([place])), count=rank + 1)
            if place % 3 == 2:
                sync.clip_grad_norm_(1.0)
                sync.step(torch.optim.SGD(model.parameters(), lr=1e-2))
        return digest(*model.parameters()), sync.scaler.get_scale()

    sync, forward, model = made()
    run(range(4))
    parameters = copy.deepcopy(model.state_dict())
    if how == "torch.save":
        torch.save(sync.state_dict(), file)
    else:
        dcp.save({"sync": sync if "engine" in how else sync.state_dict()}, checkpoint_id=folder)
    whole = run(range(4, 6))
    sync.close()
    sync, forward, model = made()
    model.load_state_dict(parameters)
    if how == "torch.save":
        sync.load_state_dict(torch.load(file))
    else:
        checkpoint = {"sync": sync if "engine" in how else sync.state_dict()}
        dcp.load(checkpoint, checkpoint_id=folder)
        if "state" in how:
            sync.load_state_dict(checkpoint["sync"])
    assert sync.window == 1
    assert run(range(4, 6)) == whole


@pytest.mark.parametrize("accumulator", ["fp32", "native", "exact"])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_what_an_engine_has_summed_before_is_gone_after_loading(kind, accumulator):
    """Load a state in which one layer is still unused into an engine that has trained, and use that layer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 70), "b": nn.Linear(3, 70)})
    model.forward = lambda name, x: model[name](x).sum()
    gradients = []
    for has_trained in (False, True):
        sync, forward = wrap(kind, copy.deepcopy(model), 25, accumulate=2, accumulator=accumulator)
        if kind == "attach":
            forward.module.forward = lambda name, x, own=forward.module: own[name](x).sum()
        else:
            forward.forward = lambda name, x, own=forward: own[name](x).sum()
        with sync.accumulate():
            sync.backward(forward("a", torch.ones(1, 3)))
        state = sync.state_dict()
        sync.abandon()
        if has_trained:
            for name in "ab":
                with sync.accumulate():
                    sync.backward(forward(name, torch.full((1, 3), 5.0)))
            sync.unscale_()
            forward.zero_grad()
        sync.load_state_dict(state)
        with sync.accumulate():
            sync.backward(forward("b", torch.ones(1, 3)))
        sync.unscale_()
        gradients.append([p.grad.clone() for p in forward.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# What cannot be saved or loaded.


def _engine(**options: Any) -> tuple[pe.GradSync, nn.Module]:
    model = Integers(options.pop("dtype", torch.float32))
    return pe.GradSync(model, accumulate=2, **options), model


def _mid_window(**options: Any) -> dict[str, Any]:
    sync, model = _engine(**options)
    with sync.accumulate():
        sync.backward(model(*integers(0)))
    return sync.state_dict()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("not a state", "need what sync.state_dict() returned"),
        ("nothing", "got none"),
        ("a number", "states is a int"),
        ("another accumulator", "accumulator='fp32'"),
        ("another rank's", "states of rank 1 of 2 on rank 0 of 2: pass the states of all ranks in a list"),
        ("different windows", "0 windows and 0 steps, 5 windows and 0 steps"),
        ("different lists", "states differ between ranks"),
        ("wrong on one rank", "rank 1: state is version None"),
    ],
)
@on_ranks(2)
def test_states_that_do_not_fit_are_refused_on_every_rank(case, message):
    rank, world = me()
    sync, _ = _engine(accumulator="exact")
    state = _mid_window(accumulator="exact")
    everybody: list[Any] = [None] * world
    torch.distributed.all_gather_object(everybody, state)
    given: Any = {
        "not a state": {"model": 1},
        "nothing": [],
        "a number": 3,
        "another accumulator": _mid_window(accumulator="fp32"),
        "another rank's": everybody[1 - rank],
        "different windows": [everybody[0], changed(everybody[1], window=5)],
        "different lists": [everybody[rank]],
        "wrong on one rank": state if rank == 0 else {"model": 1},
    }[case]
    with pytest.raises(ValueError) as error:
        sync.load_state_dict(given)
    with sync.accumulate(last=True):
        pass  # nothing has changed: the engine works
    sync.flush()
    assert message in str(error.value)


@on_ranks(2)
def test_a_state_in_the_middle_of_a_micro_batch_or_before_the_step_is_refused():
    sync, model = _engine()
    found = []
    for _ in next(sync.windows([integers(0), integers(1)])):
        found.append(error_of(sync.state_dict))
        sync.backward(model(*integers(0)))
    first, second, last = *found, error_of(sync.state_dict)
    assert "1 micro-batches of window 0 were handed out and 0 came to sync.backward" in first
    assert "2 micro-batches" in second and "have been sent and not been used" in last


@on_ranks(2)
def test_a_state_that_is_saved_again_has_the_layout_and_generators_of_the_loaded_one():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    sync = pe.GradSync(layers, accumulate=1, bucket_cap_mb=1e-6)
    for window in sync.windows([torch.ones(1, 3)] * 2):
        for x in window:
            sync.backward(layers[1](layers[0](layers[2](x))).sum())
        sync.step(torch.optim.SGD(layers.parameters(), lr=0.1))
        if sync.window:
            state = sync.state_dict()
    sync.close()
    again = pe.GradSync(layers, accumulate=1, bucket_cap_mb=1e-6)
    again.load_state_dict(state)
    torch.rand(1)
    saved, loaded = content(again.state_dict()), content(state)
    assert saved["order"] == loaded["order"] == [3, 2, 1, 0, 5, 4]  # as gradients came
    assert _pack(saved["rng"]) == _pack(loaded["rng"])
