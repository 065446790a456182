"""A user's script, as a type checker sees it: mypy reads it in `make check`, pyright in test_typing.py.

Each `type: ignore` marks a wrong argument that must be found; both checkers report one that ignores nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import pyengine as pe


def train(steps: int) -> list[float]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    losses: list[float] = []
    with pe.GradSync(model, accumulate=4, wire="bf16", accumulator="fp32", nonfinite="skip") as sync:
        assert_type(sync, pe.GradSync)
        for window in sync.windows([torch.ones(2, 4)] * steps):
            for batch in window:
                sync.backward(model(batch).sum(), count=len(batch))
            assert_type(sync.clip_grad_norm_(1.0), Tensor)
            sync.step(optimizer)
            if sync.last_record is not None and sync.last_record.loss is not None:
                losses.append(sync.last_record.loss)
    return losses


def attach(model: DistributedDataParallel) -> pe.Sync:
    return pe.attach(model, accumulate=8, wire=pe.wire.Int8(), accumulator="exact")


def wrong(model: DistributedDataParallel) -> None:
    pe.GradSync(model, accumulate=4, wire="bf17")  # type: ignore[arg-type]
    pe.GradSync(model, accumulate=4, nonfinite="ignore")  # type: ignore[arg-type]
    pe.attach(model, accumulate=8, accumulator="fp16")  # type: ignore[arg-type]
    pe.attach(model, acumulate=8)  # type: ignore[call-arg]


if __name__ == "__main__":
    assert_type(pe.launch(train, workers=2, args=(8,)), list[list[float]])
