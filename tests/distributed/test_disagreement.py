"""A difference between ranks is an error on every rank, at the latest with the next header."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from cases import engine, me, typed_error_of
from ranks import on_ranks
from torch import nn

import pyengine as pe


def _window(sync: pe.Sync, forward: nn.Module) -> None:
    with sync.accumulate():
        sync.backward(forward(torch.ones(2, 4)).sum(), count=2)


def _odd() -> bool:
    """Return whether this is rank 1, which behaves differently from the other ranks."""
    return me()[0] == 1


@pytest.mark.parametrize("case", ["other scale", "other growth", "only here", "disabled here"])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(3)
def test_loss_scales_that_differ_are_refused_before_anything_is_stepped(kind, case):
    torch.manual_seed(0)
    sync, forward = engine(kind, nn.Linear(4, 2), accumulate=1)
    scales = {"other scale": 8.0 if _odd() else 16.0}
    options: dict[str, Any] = {"init_scale": scales.get(case, 16.0)}
    if case == "other growth":
        options["growth_interval"] = 5 if _odd() else 2000
    if case != "only here" or not _odd():
        sync.scaler = pe.GradScaler("cpu", enabled=case != "disabled here" or not _odd(), **options)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)

    def body() -> None:
        _window(sync, forward)
        sync.step(optimizer)

    before = [p.detach().clone() for p in forward.parameters()]
    message = typed_error_of(body)
    assert all(torch.equal(a, b) for a, b in zip(before, forward.parameters(), strict=True))
    assert message.startswith("RuntimeError: ranks have different loss scales: rank 0: a loss scale of 16 (")
    assert "rank 1: " in message


@pytest.mark.parametrize(
    ("kind", "case", "last"),
    [
        ("own", "clip", False),
        ("own", "max_norm", True),
        ("own", "clip value", False),
        ("own", "abandon", False),
        ("own", "parameter", True),
        ("attach", "abandon", True),
        ("attach", "abandon beside own steps", False),
        ("attach", "second step", False),
        ("attach", "lr", True),
    ],
)
@on_ranks(3)
def test_a_window_used_in_another_way_on_one_rank_is_found_out_on_every_rank(kind, case, last):
    """Rank 1 uses a window differently; the next header, or the end of the loop, shows this."""
    odd = _odd()
    torch.manual_seed(0)
    sync, forward = engine(kind, nn.Linear(4, 2), accumulate=1)
    params = list(forward.parameters())
    lr = 0.2 if odd and case == "lr" else 0.1
    optimizer = torch.optim.SGD(params[:1] if odd and case == "parameter" else params, lr=lr)

    def use() -> None:
        if odd and case == "clip":
            sync.clip_grad_norm_(0.5)
        if case == "max_norm":
            sync.clip_grad_norm_(0.5 if odd else 0.25)
        if case == "clip value":
            sync.clip_grad_value_(0.5 if odd else 0.25)
        if odd and case.startswith("abandon"):
            sync.abandon()
            return
        if case == "abandon beside own steps":
            sync.unscale_()
            optimizer.step()
            optimizer.zero_grad()
            return
        sync.step(optimizer)
        if odd and case == "second step":
            sync.step(optimizer)

    def body() -> None:
        for index, window in enumerate(sync.windows([torch.ones(2, 4)] * (1 if last else 2))):
            for x in window:
                sync.backward(forward(x).sum(), count=2)
            if index == 0:
                use()

    message = typed_error_of(body)
    assert message.startswith("RuntimeError: ranks ")
    if case == "abandon":
        assert "at the same place" in message
        assert last or "1 windows, 1 steps; rank 1: 1 windows, 0 steps" in message
    else:
        assert "have used the last window differently" in message
    assert "rank 1: " in message


@on_ranks(2)
def test_a_rank_that_fails_behind_its_own_step_goes_on_with_the_next_window():
    sync, forward = engine("own", nn.Linear(4, 2), accumulate=1)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)
    done = 0
    while done < 3:
        with suppress(KeyError):
            for window in sync.windows([torch.ones(2, 4)] * (3 - done)):
                for x in window:
                    sync.backward(forward(x).sum(), count=2)
                sync.unscale_()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if _odd() and done == 1:
                    raise KeyError
    sync.synchronize()


@on_ranks(2)
def test_ranks_may_look_at_the_norm_alone():
    sync, forward = engine("own", nn.Linear(4, 2), accumulate=1)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)
    stepped = []
    for window in sync.windows([torch.ones(2, 4)] * 3):
        for x in window:
            sync.backward(forward(x).sum(), count=2)
        if _odd():
            sync.grad_norm()
            sync.unscale_()
            sync.clip_grad_norm_(float("inf"))
        stepped.append(bool(sync.step(optimizer)))
    sync.synchronize()
    assert stepped == [True] * 3


@pytest.mark.parametrize(
    ("key", "values", "texts"),
    [
        ("lr_scale", (0.5, 0.75), ("lr_scale=0.5", "lr_scale=0.75")),
        ("fixed", (False, True), ("fixed=0", "fixed=1")),
        ("layers", ([1, 2], [1, 3]), ("layers=1/2", "layers=1/3")),
        ("gain", (torch.ones(1), torch.zeros(())), ("gain=1", "gain=0")),
        ("ratio", (np.float32(2), np.float32(4)), ("ratio=2", "ratio=4")),
        ("adjust_lr_fn", ("original", "match_rms_adamw"), ("=original", "=match_rms_adamw")),
    ],
)
@on_ranks(2)
def test_what_a_group_sets_beyond_its_defaults_is_compared(key, values, texts):
    rank, _ = me()
    sync, forward = engine("own", nn.Linear(4, 2), accumulate=1)
    groups = [{"params": [forward.weight]}, {"params": [forward.bias], key: values[rank]}]
    _window(sync, forward)
    sync.step(torch.optim.SGD(groups, lr=0.1))
    message = typed_error_of(sync.synchronize)
    assert "ranks have used the last window differently" in message
    assert all(text in message for text in texts)


@pytest.mark.parametrize(
    ("sizes", "wire", "accumulator", "before"),
    [
        ((4, 4), pe.wire.FP32(), "fp32", 0),
        ((4, 900), pe.wire.BF16(), "fp32", 2),
        ((4, 900), pe.wire.FP32(), "exact", 0),
    ],
    ids=str,
)
@on_ranks(3)
def test_engines_that_run_in_another_order_on_one_rank_are_refused_on_every_rank(
    sizes, wire, accumulator, before
):
    """Rank 1 runs a window of the second engine where the other ranks run one of the first."""
    models = [nn.Linear(size, 2) for size in sizes]
    syncs = [pe.GradSync(m, accumulate=1, wire=wire, accumulator=accumulator) for m in models]
    for sync in syncs:
        sync.scaler = pe.GradScaler("cpu", init_scale=4.0)

    def run(index: int) -> None:
        with syncs[index].accumulate():
            syncs[index].backward(models[index](torch.ones(1, sizes[index])).sum())
        syncs[index].step(torch.optim.SGD(models[index].parameters(), lr=0.1))

    for index in [0, 1] * before:
        run(index)
    params = [p for m in models for p in m.parameters()]
    were = [p.detach().clone() for p in params]
    message = typed_error_of(lambda: [run(index) for index in ([1, 0] if _odd() else [0, 1])])
    moved = [float((p - b).abs().sum()) for p, b in zip(params, were, strict=True)]
    for sync in syncs:
        sync.abandon()
    for index in [0, 1] * 2:  # the engines still work
        run(index)
    assert [sync.scaler._get_growth_tracker() for sync in syncs] == [before + 2] * 2
    assert message.startswith(
        "RuntimeError: ranks have sent windows of different engines: rank 0: 2 parameters"
    )
    assert moved == [0.0] * 4


@on_ranks(2)
def test_an_optimizer_may_hold_its_parameters_in_another_order():
    """For example, the order of a set differs between processes."""
    model = nn.Linear(4, 2)
    sync = pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(list(model.parameters())[:: -1 if _odd() else 1], lr=0.1)

    def body() -> None:
        for _ in range(2):
            _window(sync, model)
            sync.step(optimizer)
        sync.synchronize()

    assert typed_error_of(body) == "no error"


@on_ranks(2)
def test_a_refused_window_is_dropped_by_the_exception_that_left_it():
    model = nn.Linear(4, 2)
    sync = pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if _odd() else 0.1)
    _window(sync, model)
    sync.step(optimizer)
    with pytest.raises(KeyError), sync.accumulate():
        sync.backward(model(torch.ones(2, 4)).sum(), count=2)
        raise KeyError
    assert not sync.is_sync_step


def test_a_window_that_was_loaded_again_is_stepped_again_by_a_wrapped_optimizer():
    model = nn.Linear(4, 2)
    sync = pe.GradSync(model, accumulate=1)
    optimizer = sync.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    state = sync.state_dict()
    for _ in range(2):
        sync.load_state_dict(state)
        before = model.weight.detach().clone()
        with sync.accumulate():
            sync.backward(model(torch.ones(2, 4)).sum(), count=2)
            optimizer.step()
            optimizer.step()  # does nothing: a window is stepped once
        assert torch.allclose(before - model.weight, torch.full((2, 4), 0.1))


@on_ranks(2)
def test_ranks_whose_parameters_have_different_strides_are_refused():
    model = nn.Conv2d(3, 4, 3)
    if _odd():
        model.to(memory_format=torch.channels_last)
    assert "rank 1 has 'weight' [4, 3, 3, 3] float32 with strides [27, 1, 9, 3]" in typed_error_of(
        lambda: pe.GradSync(model, accumulate=1)
    )


@pytest.mark.parametrize("call", ["load_state_dict", "measure", "audit"])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(3)
def test_a_call_of_every_rank_by_one_rank_is_refused_on_all_of_them(kind, call):
    torch.manual_seed(0)
    sync, forward = engine(kind, nn.Linear(4, 2), accumulate=1)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)
    for _ in range(2):  # DDP rebuilds its buckets in the second one
        _window(sync, forward)
        sync.step(optimizer)

    def body() -> None:
        if not _odd():
            _window(sync, forward)
            sync.step(optimizer)
        elif call == "load_state_dict":
            sync.load_state_dict(sync.state_dict())
        elif call == "measure":
            sync.measure(pe.GradNorms())
        else:
            sync.audit()

    message = typed_error_of(body)
    assert message.startswith("RuntimeError: ranks are at different points of their loops: rank 0: sends")
    assert f"rank 1: calls sync.{call}, which every rank must call" in message
