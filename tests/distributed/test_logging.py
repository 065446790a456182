"""What a running job decides, as `logging` says it at level DEBUG."""

from __future__ import annotations

import logging

import torch
from cases import me
from torch import nn

import pyengine as pe


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


def _a_window(level: int) -> list[str]:
    rank, _ = me()
    logger, handler, model = logging.getLogger("pyengine"), _Lines(), nn.Linear(2, 2)
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        sync = pe.GradSync(model)
        with sync.accumulate():
            sync.backward(model(torch.full((1, 2), float(rank))).sum(), count=1)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        sync.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return handler.lines


def test_each_floor_logs_what_it_decides(ranks):
    for lines in ranks(2).run(_a_window, logging.DEBUG):
        found = iter(lines)  # in this order
        for text in (
            "pyengine.comm: start stall watch over ranks (0, 1), report after 30 s",
            "process group",
            "pyengine.gradients: lay out 2 parameters in 1 buckets",
            "pyengine.engine: make a BucketReducer of 2 parameters, the first 'weight'",
            "pyengine.window: window 0: launch header of 1 micro-batches",
            "pyengine.comm: launch an all-reduce of 192 bytes over ranks (0, 1)",
            "pyengine.gradients: launch bucket 0 of 1",
            "pyengine.wire: sum a bucket of",
            "pyengine.window: window 0: skip False, Totals(count=2.0, loss=",
            "pyengine.step: step SGD",
            "pyengine.comm: end stall watch",
        ):
            assert any(text in line for line in found), (text, lines)
        assert any("window 0: header received" in line for line in lines)


def test_nothing_is_logged_where_the_level_is_off_and_nobody_sets_up_a_handler(ranks):
    assert ranks(2).run(_a_window, logging.INFO) == [[], []]
    assert not logging.getLogger("pyengine").handlers
