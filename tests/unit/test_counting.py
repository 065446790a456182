"""Counts from a function of micro-batches; an invalid count is reported with its micro-batch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pyengine.engine.engine import Engine
from pyengine.engine.loop import Counting, count_ahead
from pyengine.window.header import LocalWindow

CPU = torch.device("cpu")


def _counted(
    *given: Any, names: list[str] | None = None, is_exact: bool = False
) -> tuple[list[dict[str, float]], list[str]]:
    """Count micro-batches; return the counts and the problems."""
    local = LocalWindow(is_exact)
    return count_ahead(lambda batch: batch, given, local, names or [], CPU)[1:]


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ([], []),
        ([3, 0.5], [{"count": 3.0}, {"count": 0.5}]),
        ([torch.tensor(3), 2, torch.tensor([4.0])], [{"count": 3.0}, {"count": 2.0}, {"count": 4.0}]),
        ([{"a": 1, "b": torch.tensor(2)}, {"b": 3, "a": 0}], [{"a": 1.0, "b": 2.0}, {"b": 3.0, "a": 0.0}]),
        ([torch.tensor(True).sum()], [{"count": 1.0}]),
    ],
    ids=str,
)
def test_numbers_and_tensors_are_counted_by_name(given, counts):
    assert _counted(*given) == (counts, [])


NEED = "expected a finite number from 0 to 2**53"
WRONG = [
    (-1, f"count of micro-batch 1 is -1.0: {NEED}"),
    (torch.tensor(-1), f"count of micro-batch 1 is -1.0: {NEED}"),
    (10**400, f"count of micro-batch 1 is inf: {NEED}"),
    (True, "count of micro-batch 1: count=True is a bool"),
    (None, "count of micro-batch 1: count=None is a NoneType"),
    (torch.ones(2), "count of micro-batch 1: count: expected one number, got a tensor of shape [2]"),
    (torch.tensor(True), "count of micro-batch 1: count: expected the number of items as an integer or"),
    ({}, "count of micro-batch 1 has the names []: expected one or more strings"),
    ({1: 3}, "count of micro-batch 1 has the names [1]: expected one or more strings"),
    ({"ce": 3}, "count of micro-batch 1 has ['ce'], but ['count'] elsewhere: expected the same names"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_invalid_count_is_reported_with_its_micro_batch(wrong, message):
    _, (problem,) = _counted(3, wrong)
    assert problem.startswith(message)


@pytest.mark.parametrize("given", [{"ce": 3}, {"ce": 3, "aux": 1, "z": 2}], ids=str)
def test_missing_and_extra_names_are_reported(given):
    _, (problem,) = _counted(given, names=["ce", "aux"])
    assert problem.startswith(f"count of micro-batch 0 has {list(given)}, but ['ce', 'aux'] elsewhere")


def test_every_wrong_value_is_reported_with_its_name():
    _, problems = _counted({"ce": -1, "aux": "1"}, {"ce": 0.5, "aux": math.inf}, is_exact=True)
    assert [problem.partition(": expected")[0].partition(": count")[0] for problem in problems] == [
        "count['aux'] of micro-batch 0",
        "count['ce'] of micro-batch 0 is -1.0",
        "count['ce'] of micro-batch 1 is 0.5",
        "count['aux'] of micro-batch 1 is inf",
    ]


def test_lazy_devices_are_refused():
    engine = cast(Engine, SimpleNamespace(device=torch.device("xla")))
    with pytest.raises(ValueError, match="count= on xla: the host would have to wait"):
        Counting(engine, len)
