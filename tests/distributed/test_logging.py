"""The decisions of a running job, which `logging` reports at level DEBUG."""

from __future__ import annotations

import logging
from unittest import TestCase

import torch
from cases import me
from ranks import on_ranks
from torch import nn

import pyengine as pe


def _train_a_window() -> None:
    model = nn.Linear(2, 2)
    with pe.GradSync(model) as sync:
        with sync.accumulate():
            sync.backward(model(torch.full((1, 2), float(me()[0]))).sum(), count=1)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_each_floor_logs_what_it_decides():
    with TestCase().assertLogs("pyengine", logging.DEBUG) as logs:
        _train_a_window()
    lines = [f"{record.name}: {record.getMessage()}" for record in logs.records]
    found = iter(lines)  # consumed by any(), so the texts must occur in this order
    for text in (
        "pyengine.comm: start stall watch over ranks (0, 1), report after 30 s",
        "process group",
        "pyengine.gradients: lay out 2 parameters in 1 buckets",
        "pyengine.engine: make a BucketReducer of 2 parameters, the first 'weight'",
        "pyengine.window: window 0: launch header of 1 micro-batches",
        "pyengine.comm: launch an all-reduce of 184 bytes over ranks (0, 1)",
        "pyengine.gradients: launch bucket 0 of 1",
        "pyengine.wire: sum a bucket of",
        "pyengine.window: window 0: skip False, Totals(count=2.0, loss=",
        "pyengine.step: step SGD",
        "pyengine.comm: end stall watch",
    ):
        assert any(text in line for line in found), (text, lines)
    assert any("window 0: header received" in line for line in lines)


@on_ranks(2)
def test_nothing_is_logged_where_the_level_is_off_and_nobody_sets_up_a_handler():
    with TestCase().assertNoLogs("pyengine", logging.INFO):
        _train_a_window()
    assert not logging.getLogger("pyengine").handlers
