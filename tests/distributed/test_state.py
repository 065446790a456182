"""States between windows: runs resume with the same bits, also on other numbers of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import Integers, error_of, integers, me
from exact_cases import Cnn, Gpt, digest, wrap
from marks import rest
from ranks import on_ranks
from states import changed, content, packed, unpacked
from torch import Tensor, nn
from wire_cases import FEEDBACK

import pyengine as pe

MICRO_BATCHES, WINDOWS = 8, 3  # the last window is short


def _images(rows: list[int]) -> Tensor:
    return torch.randn(100, 3, 5, 5, generator=torch.Generator().manual_seed(1))[rows]


def _tokens(rows: list[int]) -> Tensor:
    return torch.randint(0, 50, (100, 9), generator=torch.Generator().manual_seed(1))[rows]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[list[int]], Tensor]]] = {
    "gpt": (lambda: Gpt(torch.float32), _tokens),
    "gpt in bf16": (lambda: Gpt(torch.bfloat16), _tokens),
    "cnn": (Cnn, _images),
}


# Exact sums on any number of ranks.


def _run(kind: str, name: str, saved: bytes, until: int) -> tuple[bytes, tuple[str, list[float | None]]]:
    """Begin, or resume from rank 0's `saved`; train until a window; return the state, a digest and losses."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, state = make(), unpacked(saved) if saved else None
    if state is not None:
        model.load_state_dict(state["model"])
    sampler = pe.WindowSampler(
        2 * MICRO_BATCHES * WINDOWS - 4, seed=7, micro_batch=2, global_batch=2 * MICRO_BATCHES
    )
    exact = pe.Exact(micro_batches=MICRO_BATCHES)
    sync, forward = wrap(kind, model, 0.01, accumulate=sampler.accumulate, accumulator=exact)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
        sampler.set_epoch(0, window=sync.window)
    losses: list[float | None] = []
    sync.on_step(lambda record: losses.append(record.loss))
    for step, window in enumerate(sync.windows(sampler), start=sampler.window):
        for rows in window:
            with pe.micro_batch_rng(7, step=step, index=sync.place):
                sync.backward(forward(data(rows)), count=len(rows))
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
        if step + 1 == until:
            break
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # no rank may leave a group while a collective still runs on another rank
    found = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return packed(state), (digest(*model.parameters(), *found), losses)


_alone: dict[str, tuple[str, list[float | None]]] = {}


@pytest.mark.parametrize(
    ("kind", "name", "stops"),
    [
        ("own", "gpt", [(4, 1), (3, 2), (1, WINDOWS)]),
        ("attach", "gpt", [(1, 1), (3, WINDOWS)]),
        ("own", "cnn", [(3, 2), (2, WINDOWS)]),
        *rest(("attach", "gpt in bf16", [(2, 1), (1, WINDOWS)]), ("own", "gpt", [(2, 2), (4, WINDOWS)])),
    ],
    ids=str,
)
def test_exact_sums_go_on_with_the_same_bits_on_any_number_of_ranks(ranks, kind, name, stops):
    if name not in _alone:
        _alone[name] = ranks(1).run(_run, "own", name, b"", WINDOWS)[0][1]
    saved, losses = b"", []
    for world, until in stops:
        ended = ranks(world).run(_run, kind, name, saved, until)
        saved = ended[0][0]
        losses += ended[0][1][1]
        assert all(end == ended[0][1] for _, end in ended)
    assert (ended[0][1][0], losses) == _alone[name]


@on_ranks(2)
def test_exact_sums_go_on_over_another_owner_of_the_gradients():
    """A state of `GradSync` loads into an engine over FSDP2, which has the same parameter names."""
    torch.manual_seed(0)
    first, _ = wrap("own", Gpt(torch.float32), 0.01, accumulate=2, accumulator="exact")
    with first.accumulate(last=True):
        first.backward(first._engine.module(_tokens([me()[0]])))
    first.unscale_()
    first._engine.module.zero_grad()
    state = first.state_dict()
    second, _ = wrap("fsdp", Gpt(torch.float32), 0.01, accumulate=2, accumulator="exact")
    second.load_state_dict(state)
    assert second.window == 1


# The same ranks, each with its own state: any accumulator and wire.


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "how"),
    [
        ("own", {"accumulator": "fp32"}, torch.float32, "an engine in DCP"),
        ("own", {"accumulator": "native"}, torch.float32, "torch.save"),
        ("own", {"accumulator": "exact"}, torch.bfloat16, "a state in DCP"),
        ("own", {"wire": FEEDBACK["int8"]}, torch.float32, "torch.save"),
        ("attach", {"wire": FEEDBACK["bf16"]}, torch.float32, "an engine in DCP"),
        ("attach", {"accumulator": "exact"}, torch.float32, "torch.save"),
        ("fsdp", {"wire": FEEDBACK["int8"]}, torch.float32, "an engine in DCP"),
    ],
    ids=str,
)
@on_ranks(2)
def test_ranks_go_on_with_their_own_states_and_generators_bit_for_bit(tmp_path, kind, options, dtype, how):
    """Save after the second window of a model with dropout, with a loss scale that grows."""
    rank, _ = me()
    file, folder = tmp_path / f"{rank}.pt", str(tmp_path / "checkpoint")

    def made() -> tuple[pe.Sync, nn.Module, nn.Module]:
        torch.manual_seed(rank)
        model = Gpt(dtype)
        sync, forward = wrap(kind, model, 0.01, accumulate=2, **options)
        sync.scaler = pe.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        return sync, forward, model

    def run(places: range) -> tuple[str, float]:
        for place in places:
            with sync.accumulate():
                sync.backward(forward(_tokens([place])), count=rank + 1)
            if place % 2:
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
    whole = run(range(4, 8))
    sync.close()
    sync, forward, model = made()
    model.load_state_dict(parameters)
    if how == "torch.save":
        sync.load_state_dict(torch.load(file, weights_only=True))
    else:
        checkpoint = {"sync": sync if "engine" in how else sync.state_dict()}
        dcp.load(checkpoint, checkpoint_id=folder)
        if "state" in how:
            sync.load_state_dict(checkpoint["sync"])
    assert sync.window == 2
    assert run(range(4, 8)) == whole


@on_ranks(2)
def test_a_state_is_tensors_and_plain_values():
    sync, _ = wrap("own", Gpt(torch.float32), 0.01, accumulate=1, wire=FEEDBACK["int8"])
    sync.scaler = pe.GradScaler("cpu")
    with sync.accumulate():
        sync.backward(sync._engine.module(_tokens([me()[0]])))
    sync.unscale_()
    state = sync.state_dict()

    def kinds(value: Any) -> set[type]:
        items = value.values() if isinstance(value, dict) else value
        return set().union(*map(kinds, items)) if isinstance(value, dict | list | tuple) else {type(value)}

    assert kinds(state) <= {Tensor, int, float, bool, str, type(None)}
    assert packed(unpacked(packed(state))) == packed(state)
    assert content(state)["residuals"].keys() == {name for name, _ in Gpt(torch.float32).named_parameters()}


# Another number of ranks, with any accumulator.


def _saved() -> dict[str, Any]:
    """Return a state with residuals, a loss scale and gradients that no optimizer has used."""
    torch.manual_seed(0)
    sync, model = _engine(wire=FEEDBACK["int8"], scaler=True)
    for index in range(2):
        with sync.accumulate():
            sync.backward(model(*integers(index)), count=1)
    sync.unscale_()
    return sync.state_dict()


def _loaded(state: dict[str, Any]) -> tuple[int, float, bool, bool, bool]:
    sync, model = _engine(wire=FEEDBACK["int8"], scaler=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sync.load_state_dict(state)
    own = content(sync.state_dict())
    kept = content(state)["carry"]
    return (
        sync.window,
        sync.scaler.get_scale(),
        any(bool(part.any()) for part in own["residuals"].values()),
        bool(torch.equal(before, torch.get_rng_state()) and torch.equal(own["rng"]["torch"], before)),
        all(torch.equal(p.grad, kept[name]) for name, p in model.named_parameters()),
    )


def test_on_another_number_of_ranks_residuals_begin_at_zero_and_generators_stay(ranks):
    state = ranks(2).run(_saved)[0]
    assert any(bool(part.any()) for part in content(state)["residuals"].values())
    assert ranks(3).run(_loaded, state) == [(1, 8.0, False, True, True)] * 3


# What cannot be saved or loaded.


def _engine(**options: Any) -> tuple[pe.GradSync, nn.Module]:
    model, has_scaler = Integers(options.pop("dtype", torch.float32)), options.pop("scaler", False)
    sync = pe.GradSync(model, accumulate=2, **options)
    if has_scaler:
        sync.scaler = pe.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    return sync, model


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("not a state", "expected what sync.state_dict() returned"),
        ("a list", "state is a list"),
        ("a number", "state is a int"),
        ("an earlier version", "start the engine without this state"),
        ("another accumulator", "accumulator='fp32'"),
        ("another rank's", "pass each rank its own state: state of rank 1 of 2 on rank 0 of 2"),
        ("other windows", "the ranks' states are from different saves"),
        ("another scale", "loss scaler {'scale': 1.0}"),
        ("wrong on one rank", "rank 1: state is version None"),
        ("parts of two ranks", "with one rank's part"),
    ],
)
@on_ranks(2)
def test_states_that_do_not_fit_are_refused_on_every_rank(case, message):
    rank, world = me()
    sync, _ = _engine(accumulator="exact")
    state = sync.state_dict()
    everybody: list[Any] = [None] * world
    torch.distributed.all_gather_object(everybody, state)
    given: Any = {
        "not a state": {"model": 1},
        "a list": everybody,
        "a number": 3,
        "an earlier version": {**state, "version": 2},
        "another accumulator": _engine(accumulator="fp32")[0].state_dict(),
        "another rank's": everybody[1 - rank],
        "other windows": changed(state, window=rank),
        "another scale": changed(state, scaler={"scale": 1.0 + rank}),
        "wrong on one rank": state if rank == 0 else {"model": 1},
        "parts of two ranks": {**everybody[0], **everybody[1]},
    }[case]
    with pytest.raises(ValueError) as error:
        sync.load_state_dict(given)
    with sync.accumulate(last=True):
        pass  # nothing has changed: the engine works
    sync.flush()
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["own", "attach", "fsdp"])
@on_ranks(2)
def test_a_state_inside_a_window_is_refused_with_when_to_call(kind):
    sync, forward = wrap(kind, Gpt(torch.float32), 25, accumulate=2)
    optimizer, found = torch.optim.SGD(forward.parameters(), lr=0.1), []
    for window in sync.windows([[0], [1]]):
        for rows in window:
            found.append(error_of(sync.state_dict))
            sync.backward(forward(_tokens(rows)))
            found.append(error_of(sync.state_dict))
        sync.clip_grad_norm_(1.0)
        found.append(error_of(sync.state_dict))
        sync.step(optimizer)
        state = sync.state_dict()
    assert all(text.startswith("call sync.state_dict() between windows, after sync.step(") for text in found)
    assert (len(found), state["window"], state["steps"]) == (5, 1, 1)
    assert sync.state_dict()["window"] == 1


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
    assert saved["order"] == loaded["order"] == [3, 2, 1, 0, 5, 4]  # the order of gradients
    assert packed(saved["rng"]) == packed(loaded["rng"])
