"""Losses that are means over different items become one loss with one divisor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pyengine.window.denominators import Denominators, base_of

CPU = torch.device("cpu")


def _known(*counts: dict[str, float], **totals: float) -> Denominators:
    return Denominators(totals, counts)


def _loss(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("totals", "base"),
    [({"a": 4.0, "b": 2.0}, "a"), ({"a": 0.0, "b": 2.0}, "b"), ({"a": 0.0, "b": 0.0}, "a"), ({}, "count")],
    ids=str,
)
def test_the_divisor_is_the_first_total_that_is_not_0(totals, base):
    assert base_of(totals) == base


def test_behind_the_division_every_loss_is_a_mean_over_its_own_items():
    a, b = _loss(6.0), _loss(5.0)
    loss = _known(ce=8.0, aux=2.0).weigh({"aux": b, "ce": a}, CPU)
    loss.backward()
    assert loss.item() / 8 == 6 / 8 + 5 / 2
    assert (a.grad.item() / 8, b.grad.item() / 8) == (1 / 8, 1 / 2)
    alone = _known(ce=8.0)
    assert alone.weigh(a, CPU) is a and alone.weigh({"ce": b}, CPU) is b


@pytest.mark.parametrize("aux", [0.0, _loss(1.0), _loss(math.nan)], ids=["0", "1", "nan"])
@pytest.mark.parametrize("ce", [0.0, 6.0])
def test_a_loss_of_which_nothing_was_counted_is_left_out_whatever_it_is(ce, aux):
    loss = _known(ce=8.0, aux=0.0).weigh({"ce": ce and _loss(ce), "aux": aux}, CPU)
    loss.backward()
    assert loss.item() == ce
    assert getattr(aux, "grad", None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_ratio_is_not_rounded_to_a_narrow_type(dtype):
    loss = _known(ce=1001.0, aux=3.0).weigh({"ce": 0, "aux": _loss(1.0, dtype)}, CPU)
    assert loss.dtype is torch.float32
    assert loss.item() == torch.tensor(1001 / 3).item()


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (_loss(1.0), "got a single loss, but this window has counts for 'ce', 'aux'"),
        ({"ce": _loss(1.0)}, "got 'ce', but this window has counts for 'ce', 'aux'"),
        ({"ce": _loss(1.0), "aux": 0, "z": 0}, "got 'ce', 'aux', 'z'"),
        ({}, "got an empty dict"),
        ({"ce": torch.ones(2), "aux": 0}, r"loss\['ce'\]: got \[2\], expected a 0-dim"),
        ({"ce": torch.tensor(1), "aux": 0}, r"loss\['ce'\]: got torch.int64, expected a 0-dim"),
        ({"ce": 0, "aux": 2}, r"loss\['aux'\]: got 2, expected a 0-dim"),
        ({"ce": 0, "aux": False}, r"loss\['aux'\]: got False"),
        ({"ce": 0, "aux": None}, r"loss\['aux'\]: got None"),
    ],
    ids=str,
)
def test_losses_that_are_not_those_counted_are_refused(losses: Any, message: str):
    with pytest.raises(ValueError, match=message):
        _known(ce=8.0, aux=2.0).weigh(losses, CPU)


def test_a_micro_batch_adds_its_count_of_the_divisor_and_padding_nothing():
    known = _known({"a": 0.0, "b": 2.0}, {"a": 0.0, "b": 3.0}, a=0.0, b=9.0)
    assert [known.take(done, handed=done + 1) for done in range(3)] == [2.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("names", "has_several_out", "done", "handed", "message"),
    [
        ("a", False, 3, 3, ""),
        ("a", False, 2, 2, ""),  # after a break, only the micro-batches that ran count
        ("a", False, 1, 2, ""),
        ("a", True, 3, 3, ""),
        ("a", True, 2, 3, "it is not known whose counts to leave out"),
        ("ab", False, 3, 3, ""),
        ("ab", False, 2, 2, "totals that count 3 micro-batches"),
        ("ab", False, 2, 3, "totals that count 3 micro-batches"),
    ],
)
def test_a_window_that_ends_early_is_refused_where_its_divisor_would_be_wrong(
    names, has_several_out, done, handed, message
):
    known = _known(*[dict.fromkeys(names, 1.0)] * 3, **dict.fromkeys(names, 3.0))
    known.take(0, handed=1 + has_several_out)
    problems = known.problems(done, handed=handed)
    assert bool(problems) == bool(message)
    assert message in "".join(problems)
