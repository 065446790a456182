"""Wrong input raises an error with the remedy on every rank, and nothing is lost."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    Integers,
    engine,
    integers,
    me,
    recorded_warnings,
    records_of,
    typed_error_of,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pyengine as pe


@pytest.mark.parametrize(
    "kind, needle",
    [
        ("shape", "rank 0, 1 has '1.weight' [1, 4] float32; rank 2 has '1.weight' [2, 4] float32"),
        ("count", "rank 0, 2 has no such parameter; rank 1 has '1.weight' [1, 4] float32"),
        ("dtype", "rank 0 has 'weight' [4, 3] bfloat16; rank 1, 2 has 'weight' [4, 3] float32"),
        ("frozen", "rank 2 has 'bias' [4] float32, requires_grad=False"),
    ],
)
@on_ranks(3)
def test_ranks_with_different_parameters_name_the_first_difference_everywhere(kind, needle):
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
    message = typed_error_of(lambda: pe.GradSync(model, accumulate=1))
    assert message.startswith("ValueError") and needle in message and "on every rank" in message


@pytest.mark.parametrize(
    ("kind", "count", "on_device"),
    [("own", -1.0, True), ("own", math.nan, False), ("attach", math.inf, True), ("attach", -1.0, False)],
)
@on_ranks(3)
def test_a_bad_count_on_one_rank_raises_on_all_and_the_engine_goes_on(kind, count, on_device):
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

    message = typed_error_of(window, count)
    sync.abandon()
    assert torch.equal(model.matrix, before)
    window(3)  # the engine still works
    assert "but rank 2: count of micro-batch 1 is" in message
    assert "finite and not negative" in message
    assert not torch.equal(model.matrix, before)


@on_ranks(2)
def test_a_refused_window_stays_refused_until_a_new_loop_begins():
    rank, _ = me()
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    windows = sync.windows([torch.ones(1, 2)])
    for x in next(windows):
        sync.backward(model(x).sum(), count=-1 if rank == 1 else 1)
        break
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    errors = [typed_error_of(lambda: sync.step(optimizer)) for _ in range(2)]
    for window in sync.windows([torch.ones(1, 2)]):  # a new loop starts clean
        for x in window:
            sync.backward(model(x).sum())
        assert sync.step(optimizer)
    first, second = errors
    assert first == second and "rank 1: count of micro-batch 0 is -1.0" in first


@on_ranks(2)
def test_a_window_that_counts_nothing_is_skipped_with_a_reason():
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    records = records_of(sync)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum(), count=0)
        assert not sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
    record = records[0]
    assert record.skipped and "count is 0" in record.reason and record.loss is None


def _mean_by_cross_entropy(out: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(torch.cat([out, -out], 1), labels)


def _mean_by_mask(out: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    return (out.squeeze(1).square() * mask).sum() / mask.sum()


def _zero_without_labels(out: Tensor, labels: Tensor) -> Tensor:
    return _mean_by_mask(out, labels) if (labels != -100).any() else out.sum() * 0


@pytest.mark.parametrize("mean", [_mean_by_cross_entropy, _mean_by_mask, _zero_without_labels])
@on_ranks(2)
def test_a_mean_over_no_labels_is_left_out_unless_its_gradient_is_nan(mean):
    """The loss is a mean times its count, which may be nan * 0 in the second micro-batch of rank 0."""
    rank, world = me()
    x, labels = torch.ones(3, 2), [torch.tensor([0, 1, -100]), torch.tensor([0, 0, 0])]
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=2, nonfinite="skip")
    records = records_of(sync)
    with torch.no_grad():
        expected = [mean(model(x), each) * (each != -100).sum() for each in labels]
    labels[1] = torch.full((3,), -100) if rank == 0 else labels[1]
    for each in labels:
        n = (each != -100).sum()
        with sync.accumulate():
            sync.backward(mean(model(x), each) * n, count=n)
    with recorded_warnings():  # the first skipped step warns
        stepped = sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert bool(stepped) is (mean is not _mean_by_mask)
    whole = (world * expected[0] + (world - 1) * expected[1]) / 7
    assert records[0].count == 7 and records[0].loss == pytest.approx(float(whole), rel=1e-6)


@on_ranks(2)
def test_misuse_names_itself_and_the_remedy():
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def backward() -> None:
        sync.backward(model(torch.ones(1, 2)).sum())

    with pytest.raises(RuntimeError, match="flush outside a window"):
        sync.flush()
    with pytest.raises(TypeError, match=r"scaler is a Sharded: expected a torch\.amp\.GradScaler"):
        sync.scaler = type("Sharded", (torch.amp.GradScaler,), {})("cpu")
    with sync.accumulate():
        backward()
        with pytest.raises(RuntimeError, match=r"finish the window, or call sync\.flush\(\) to end it here"):
            sync.step(optimizer)
        with pytest.raises(RuntimeError, match=r"are being accumulated \(1 of 2 backwards done\)"):
            sync.clip_grad_norm_(1.0)
    with sync.accumulate():
        backward()
        remedy = "backward after window 0 was sent: put several backwards .* `with sync.micro_batch"
        with pytest.raises(RuntimeError, match=remedy):
            backward()
    with pytest.raises(RuntimeError, match="reduced and never used"):
        sync.accumulate().__enter__()
    model.extra = nn.Linear(2, 2)
    model.extra.weight.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"optimizer has a parameter of shape \[2, 2\]"):
        sync.step(torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("flushes", [True, False])
@on_ranks(2)
def test_a_window_left_early_is_flushed_on_request_and_refused_otherwise(flushes):
    rank, _ = me()
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=3)
    windows = sync.windows([torch.full((1, 1), float(rank + k)) for k in range(5)])
    for x in next(windows):
        sync.backward(model(x).sum())
        break
    if not flushes:
        with pytest.raises(RuntimeError, match=r"after 1 backwards and never sent: call sync\.flush\(\)"):
            next(windows)
        return
    sync.flush()
    sync.unscale_()
    assert model.weight.grad.item() == 0.5
    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert sum(1 for _ in next(windows)) == 3  # the loader continues where the loop was left


@on_ranks(2)
def test_a_rank_without_any_parameter_is_named_on_all():
    rank, _ = me()
    model = nn.Linear(2, 1)
    assert typed_error_of(lambda: pe.GradSync([] if rank == 1 else model, accumulate=1)).startswith(
        "ValueError: rank 1: params_or_module: got no parameter"
    )
