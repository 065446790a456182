"""`pe.audit` with Accelerate's own loop: silent for a correct loop, and names the error in a wrong one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from test_accelerate_windows import accelerated, loader
from torch import nn
from worlds import FEATURES

pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

from accelerate import Accelerator

import pyengine as pe

WINDOWS = 4


def _train(bug: str) -> tuple[str, int]:
    """Train as in Accelerate's documentation, under `pe.audit`; return the error message and the step."""
    with accelerated():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, 1))
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader(2 * 2 * 2 * WINDOWS)
        )
        ddp, optimizer, data = prepared
        watch = pe.audit(ddp, optimizer, every=1)
        try:
            for index, (x,) in enumerate(data):
                if bug == "a flipped bit" and index == 3 and accelerator.process_index == 1:
                    model[0].weight.data.view(torch.int32)[0, 0] ^= 1
                silenced = ddp.no_sync() if bug == "never reduced" else nullcontext()
                with accelerator.accumulate(ddp), silenced:
                    accelerator.backward(ddp(x).square().mean())
                    if accelerator.sync_gradients:
                        watch.reduced()
                        accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        except pe.AuditError as error:
            return str(error), watch.step
        return "", watch.step


@pytest.mark.parametrize(
    ("bug", "said", "at"),
    [
        ("", "", WINDOWS),
        ("a flipped bit", "parameter of '0.weight', at step 1: gradients and optimizer state agree", 1),
        ("never reduced", "not reduced: every rank has only the gradient of its own micro-batches", 0),
    ],
)
def test_an_audited_loop_of_accelerate(ranks, bug, said, at):
    for found, stepped in ranks(2).run(_train, bug):
        assert said in found and bool(found) == bool(bug) and stepped == at, found
