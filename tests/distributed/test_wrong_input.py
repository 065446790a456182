"""Wrong input is answered on every rank, with what to do about it, and nothing is lost."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Integers, assert_same, engine, grads, integers, me, mean_of_integers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


def _error(fn, *args: object) -> str:
    try:
        fn(*args)
    except (ValueError, TypeError, RuntimeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _layouts(kind: str) -> str:
    rank, _ = me()
    if kind == "shape":
        model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1 + rank // 2))
    elif kind == "count":
        model = nn.Sequential(nn.Linear(3, 4), *([nn.Linear(4, 1)] if rank == 1 else []))
    elif kind == "dtype":
        model = nn.Linear(3, 4, dtype=torch.bfloat16 if rank == 0 else torch.float32)
    else:
        model = nn.Linear(3, 4).requires_grad_()
        model.bias.requires_grad_(rank != 2)
    return _error(lambda: pe.GradSync(model, accumulate=1))


@pytest.mark.parametrize(
    "kind, needle",
    [
        ("shape", "rank 0, 1 has '1.weight' [1, 4] float32; rank 2 has '1.weight' [2, 4] float32"),
        ("count", "rank 0, 2 has no such parameter; rank 1 has '1.weight' [1, 4] float32"),
        ("dtype", "rank 0 has 'weight' [4, 3] bfloat16; rank 1, 2 has 'weight' [4, 3] float32"),
        ("frozen", "rank 2 has 'bias' [4] float32, requires_grad=False"),
    ],
)
def test_ranks_with_different_parameters_name_the_first_difference_everywhere(ranks, kind, needle):
    for message in ranks(3).run(_layouts, kind):
        assert message.startswith("ValueError") and needle in message and "on every rank" in message


def _bad_count(kind: str, count: float, on_device: bool) -> tuple[str, float]:
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    before = model.matrix.detach().clone()

    def window(value: float) -> None:
        for k in range(2):
            with sync.accumulate():
                bad = rank == world - 1 and k == 1
                given = torch.tensor(value) if on_device else value
                sync.backward(forward(*integers(10 * rank + k)), count=given if bad else 3)
        sync.step(torch.optim.SGD(model.parameters(), lr=1.0))

    message = _error(window, count)
    sync.abandon()
    assert torch.equal(model.matrix, before)
    window(3)  # the engine goes on
    return message, (model.matrix - before).abs().sum().item()


@pytest.mark.parametrize(
    ("kind", "count", "on_device"),
    [("own", -1.0, True), ("own", math.nan, False), ("attach", math.inf, True), ("attach", -1.0, False)],
)
def test_a_bad_count_on_one_rank_raises_on_all_and_the_engine_goes_on(ranks, kind, count, on_device):
    for message, moved in ranks(3).run(_bad_count, kind, count, on_device):
        assert message.startswith("ValueError: rank 2: count of micro-batch 1 is")
        assert "finite and not negative" in message
        assert moved > 0


def _asks_again() -> list[str]:
    rank, _ = me()
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    windows = sync.windows([torch.ones(1, 2)])
    for x in next(windows):
        sync.backward(model(x).sum(), count=-1 if rank == 1 else 1)
        break
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    errors = [_error(lambda: sync.step(optimizer)) for _ in range(2)]
    for window in sync.windows([torch.ones(1, 2)]):  # a new loop starts clean
        for x in window:
            sync.backward(model(x).sum())
        assert sync.step(optimizer)
    return errors


def test_a_refused_window_stays_refused_until_a_new_loop_begins(ranks):
    for first, second in ranks(2).run(_asks_again):
        assert first == second and "rank 1: count of micro-batch 0 is -1.0" in first


def _zero_count(kind: str) -> None:
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    for window in sync.windows([integers(10 * rank + k) for k in range(2)]):
        for k, (x, t) in enumerate(window):
            rejected = rank == 0 and k == 0
            sync.backward(forward(x, t) * (0.0 if rejected else 1.0), count=0 if rejected else 3)
        sync.unscale_()
        batches = [integers(10 * r + k) for r in range(world) for k in range(2) if (r, k) != (0, 0)]
        assert_same(grads(model), mean_of_integers(model, batches, 3 * len(batches)))


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_count_zero_leaves_a_micro_batch_out_of_the_divisor(ranks, kind):
    ranks(2).run(_zero_count, kind)


def _all_zero() -> pe.StepRecord:
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum(), count=0)
        assert not sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
    return records[0]


def test_a_window_that_counts_nothing_is_skipped_with_a_reason(ranks):
    for record in ranks(2).run(_all_zero):
        assert record.skipped and "count is 0" in record.reason and record.loss is None


def _misuse(what: str) -> str:
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 2)
    if what == "backward outside":
        return _error(lambda: sync.backward(model(x).sum()))
    if what == "flush outside":
        return _error(sync.flush)
    with sync.accumulate():
        sync.backward(model(x).sum())
        if what == "early step":
            return _error(lambda: sync.step(optimizer))
        if what == "early clip":
            return _error(lambda: sync.clip_grad_norm_(1.0))
    with sync.accumulate():
        sync.backward(model(x).sum())
        if what == "late backward":
            return _error(lambda: sync.backward(model(x).sum()))
    if what == "unused gradients":
        return _error(sync.accumulate().__enter__)
    if what == "loss shape":
        return _error(lambda: sync.backward(model(torch.ones(3, 2))))
    if what == "count shape":
        return _error(lambda: sync.backward(model(x).sum(), count=torch.ones(2)))
    if what == "added later":
        model.extra = nn.Linear(2, 2)
        model.extra.weight.grad = torch.ones(2, 2)
        return _error(lambda: sync.step(torch.optim.SGD(model.parameters(), lr=1.0)))
    if what == "scaler":
        return _error(lambda: setattr(sync, "scaler", type("Sharded", (torch.amp.GradScaler,), {})("cpu")))
    raise AssertionError(what)


@pytest.mark.parametrize(
    "what, needle",
    [
        ("backward outside", "RuntimeError: backward outside a window"),
        ("flush outside", "RuntimeError: flush outside a window"),
        ("early step", "finish the window, or call sync.flush() to end it here"),
        ("early clip", "no synchronised gradients: gradients are being accumulated (1 of 2 backwards done)"),
        ("late backward", "RuntimeError: backward after window 0 was sent"),
        ("unused gradients", "reduced and never used"),
        ("loss shape", "ValueError: loss: got [3, 1], need a 0-dim tensor"),
        ("count shape", "ValueError: count: got a tensor of shape [2]"),
        ("added later", "ValueError: optimizer has a parameter of shape [2, 2]"),
        ("scaler", "TypeError: scaler is a Sharded: need a torch.amp.GradScaler"),
    ],
)
def test_misuse_names_itself_and_the_remedy(ranks, what, needle):
    for message in ranks(2).run(_misuse, what):
        assert needle in message


def _left_early(flush: bool) -> str | float:
    rank, _ = me()
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=3)
    windows = sync.windows([torch.full((1, 1), float(rank + k)) for k in range(5)])
    for x in next(windows):
        sync.backward(model(x).sum())
        break
    if not flush:
        return _error(lambda: next(windows))
    sync.flush()
    sync.unscale_()
    first = model.weight.grad.item()
    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert sum(1 for _ in next(windows)) == 3  # the loader goes on where the loop broke off
    return first


def test_a_window_left_early_is_flushed_on_request_and_refused_otherwise(ranks):
    assert ranks(2).run(_left_early, True) == [0.5, 0.5]
    for message in ranks(2).run(_left_early, False):
        assert "was left after 1 backwards and never sent: call sync.flush()" in message


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="none of 2 parameters requires a gradient"):
        pe.GradSync(nn.Linear(2, 2).requires_grad_(False), accumulate=1)


def test_a_type_that_no_kernel_knows_is_refused():
    with pytest.raises(ValueError, match="'weight' is torch.float64"):
        pe.GradSync(nn.Linear(2, 2, dtype=torch.float64), accumulate=1)


def _attach_errors() -> list[str]:
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    pe.attach(hooked, accumulate=2)
    return [
        _error(lambda: pe.attach(nn.Linear(2, 2), accumulate=1)),
        _error(lambda: pe.attach(sparse, accumulate=1)),
        _error(lambda: pe.attach(hooked, accumulate=1)),
    ]


def test_attach_refuses_what_it_cannot_carry(ranks):
    for bare, sparse, twice in ranks(2).run(_attach_errors):
        assert "ddp_model is a Linear: need a DistributedDataParallel" in bare
        assert "0 has sparse=True" in sparse and "sparse=False" in sparse
        assert "ValueError" in twice and "ddp_model has a communication hook" in twice


def _one_rank_differs() -> str:
    rank, _ = me()
    options = {"wire": pe.wire.BF16()} if rank == 1 else {}
    return _error(lambda: pe.GradSync(nn.Linear(2, 2), **options))


def test_a_setting_that_differs_on_one_rank_is_an_error_on_all(ranks):
    for message in ranks(3).run(_one_rank_differs):
        assert message.startswith("ValueError: ranks have different settings: rank 0 has wire=FP32()")


def _no_parameters_on_one_rank() -> str:
    rank, _ = me()
    model = nn.Linear(2, 1)
    return _error(lambda: pe.GradSync([] if rank == 1 else model, accumulate=1))


def test_a_rank_without_any_parameter_is_named_on_all(ranks):
    for message in ranks(2).run(_no_parameters_on_one_rank):
        assert message.startswith("ValueError: rank 1: params_or_module: got no parameter")
