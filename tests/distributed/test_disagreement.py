"""Ranks that part: whatever only some of them do or have is an error on all of them,
at the latest with the next header.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import engine, me
from torch import nn

import pyengine as pe


def _window(sync: pe.Sync, forward: nn.Module) -> None:
    with sync.accumulate():
        sync.backward(forward(torch.ones(2, 4)).sum(), count=2)


def _error(body: Callable[[], object]) -> str:
    try:
        body()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _odd(rank: int) -> bool:
    """Whether this is the one rank that does something of its own."""
    return rank == 1


def _scaled(kind: str, case: str) -> str:
    rank, _ = me()
    torch.manual_seed(0)
    sync, forward = engine(kind, nn.Linear(4, 2), accumulate=1)
    scales = {"other scale": 8.0 if _odd(rank) else 16.0}
    options: dict[str, Any] = {"init_scale": scales.get(case, 16.0)}
    if case == "other growth":
        options["growth_interval"] = 5 if _odd(rank) else 2000
    if case != "only here" or not _odd(rank):
        sync.scaler = pe.GradScaler("cpu", enabled=case != "disabled here" or not _odd(rank), **options)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)

    def body() -> None:
        _window(sync, forward)
        sync.step(optimizer)

    before = [p.detach().clone() for p in forward.parameters()]
    message = _error(body)
    assert all(torch.equal(a, b) for a, b in zip(before, forward.parameters(), strict=True))
    return message


@pytest.mark.parametrize("case", ["other scale", "other growth", "only here", "disabled here"])
@pytest.mark.parametrize("kind", ["own", "attach"])
def test_loss_scales_that_differ_are_refused_before_anything_is_stepped(ranks, kind, case):
    for message in ranks(3).run(_scaled, kind, case):
        assert message.startswith(
            "RuntimeError: ranks have different loss scales: rank 0: a loss scale of 16 ("
        )
        assert "rank 1: " in message and "on every rank" in message


def _uses_alone(kind: str, case: str, last: bool) -> str:
    """Rank 1 uses a window in a way of its own; the next header, or the end of the loop, tells."""
    rank, _ = me()
    odd = _odd(rank)
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
        if odd and case == "abandon":
            sync.abandon()
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

    return _error(body)


@pytest.mark.parametrize(
    ("kind", "case", "last"),
    [
        ("own", "clip", False),
        ("own", "max_norm", True),
        ("own", "abandon", False),
        ("own", "parameter", True),
        ("attach", "abandon", True),
        ("attach", "second step", False),
        ("attach", "lr", True),
    ],
)
def test_a_window_used_in_another_way_on_one_rank_is_found_out_on_every_rank(ranks, kind, case, last):
    for message in ranks(3).run(_uses_alone, kind, case, last):
        assert message.startswith("RuntimeError: ranks ")
        assert (
            "at the same place" if case == "abandon" else "have used the last window differently"
        ) in message
        assert "rank 1: " in message


def _uses_alike() -> list[bool]:
    """What may differ: a look at the norm, clipping that cuts nothing,
    a dropped window after a failure here.
    """
    rank, _ = me()
    sync, forward = engine("own", nn.Linear(4, 2), accumulate=1)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)
    stepped = []
    for window in sync.windows([torch.ones(2, 4)] * 3):
        for x in window:
            sync.backward(forward(x).sum(), count=2)
        if _odd(rank):
            sync.grad_norm()
            sync.clip_grad_norm_(float("inf"))
        stepped.append(bool(sync.step(optimizer)))
    sync.synchronize()
    return stepped


def test_ranks_may_look_at_the_norm_alone(ranks):
    assert ranks(2).run(_uses_alike) == [[True] * 3] * 2


def _not_nested(case: str) -> str:
    rank, _ = me()
    sync, forward = engine("own", nn.Linear(4, 2), accumulate=1)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.2 if _odd(rank) and case == "lr" else 0.1)
    _window(sync, forward)
    sync.step(optimizer)
    return _error(sync.synchronize)


def test_synchronize_compares_how_ranks_used_the_last_window(ranks):
    assert ranks(2).run(_not_nested, "alike") == ["no error"] * 2
    for message in ranks(2).run(_not_nested, "lr"):
        assert (
            "used the last window differently: rank 0: SGD(lr=0.1" in message
            and "rank 1: SGD(lr=0.2" in message
        )


def _group_differs(key: str, values: tuple[Any, Any]) -> str:
    """Step with two groups, the second of which has a key that the optimizer has no default for."""
    rank, _ = me()
    sync, forward = engine("own", nn.Linear(4, 2), accumulate=1)
    groups = [{"params": [forward.weight]}, {"params": [forward.bias], key: values[rank]}]
    _window(sync, forward)
    sync.step(torch.optim.SGD(groups, lr=0.1))
    return _error(sync.synchronize)


@pytest.mark.parametrize(
    ("key", "values", "told"),
    [
        ("lr_scale", (0.5, 0.75), ("lr_scale=0.5", "lr_scale=0.75")),
        ("fixed", (False, True), ("fixed=0", "fixed=1")),
        ("layers", ([1, 2], [1, 3]), ("layers=1/2", "layers=1/3")),
        ("gain", (torch.ones(1), torch.zeros(())), ("gain=1", "gain=0")),
        ("ratio", (np.float32(2), np.float32(4)), ("ratio=2", "ratio=4")),
    ],
)
def test_a_number_of_a_group_that_has_no_default_is_compared(ranks, key, values, told):
    for message in ranks(2).run(_group_differs, key, values):
        assert "ranks have used the last window differently" in message
        assert all(text in message for text in told)


def _two_engines(
    sizes: tuple[int, int], wire: pe.wire.Wire, accumulator: str, before: int
) -> tuple[str, list[float]]:
    """Behind some windows in order, rank 1 runs the second engine's window where the others run the first
    one's.
    """
    rank, _ = me()
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
    message = _error(lambda: [run(index) for index in ([1, 0] if _odd(rank) else [0, 1])])
    moved = [float((p - b).abs().sum()) for p, b in zip(params, were, strict=True)]
    for sync in syncs:
        sync.abandon()
    for index in [0, 1] * 2:  # the engines go on
        run(index)
    assert [sync.scaler._get_growth_tracker() for sync in syncs] == [before + 2] * 2
    return message, moved


@pytest.mark.parametrize(
    ("sizes", "wire", "accumulator", "before"),
    [((4, 4), "fp32", "fp32", 0), ((4, 900), "bf16", "fp32", 2), ((4, 900), "fp32", "exact", 0)],
)
def test_engines_that_run_in_another_order_on_one_rank_are_refused_on_every_rank(
    ranks, sizes, wire, accumulator, before
):
    wires = {"fp32": pe.wire.FP32(), "bf16": pe.wire.BF16()}
    for message, moved in ranks(3).run(_two_engines, sizes, wires[wire], accumulator, before):
        assert message.startswith(
            "RuntimeError: ranks have sent windows of different engines: rank 0: 2 parameters"
        )
        assert moved == [0.0] * 4


def _another_order() -> str:
    """The same parameters in another order, as sets have them in every process."""
    rank, _ = me()
    model = nn.Linear(4, 2)
    sync = pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(list(model.parameters())[:: -1 if _odd(rank) else 1], lr=0.1)

    def body() -> None:
        for _ in range(2):
            _window(sync, model)
            sync.step(optimizer)
        sync.synchronize()

    return _error(body)


def test_an_optimizer_may_hold_its_parameters_in_another_order(ranks):
    assert ranks(2).run(_another_order) == ["no error"] * 2


def _dropped_after_an_error() -> list[str]:
    """A body that raises behind a backward whose window is refused: the engine is clean after one abandon."""
    rank, _ = me()
    model = nn.Linear(4, 2)
    sync = pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if _odd(rank) else 0.1)
    _window(sync, model)
    sync.step(optimizer)
    with pytest.raises(KeyError), sync.accumulate():
        sync.backward(model(torch.ones(2, 4)).sum(), count=2)
        raise KeyError
    return [str(sync.is_sync_step)]


def test_a_refused_window_is_dropped_by_the_exception_that_left_it(ranks):
    assert ranks(2).run(_dropped_after_an_error) == [["False"]] * 2


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
            optimizer.step()  # once a window
        assert torch.allclose(before - model.weight, torch.full((2, 4), 0.1))


def test_a_scaler_that_was_removed_may_serve_another_engine():
    scaler = pe.GradScaler("cpu")
    first, second = (pe.GradSync(nn.Linear(2, 1), accumulate=1) for _ in range(2))
    first.scaler = scaler
    first.scaler = None
    second.scaler = scaler
    assert second.scaler is scaler


def _memory_formats() -> str:
    rank, _ = me()
    model = nn.Conv2d(3, 4, 3)
    if _odd(rank):
        model.to(memory_format=torch.channels_last)
    return _error(lambda: pe.GradSync(model, accumulate=1))


def test_ranks_whose_parameters_have_different_strides_are_refused(ranks):
    for message in ranks(2).run(_memory_formats):
        assert "rank 1 has 'weight' [4, 3, 3, 3] float32 with strides [27, 1, 9, 3]" in message
