"""torch.compile and builds without the extension: the same gradients."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cases import Integers, assert_same, grads, integers, me, mean_of_integers
from marks import rest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


def _compiled(kind: str) -> None:
    rank, world = me()
    torch._dynamo.reset()
    model = Integers(torch.float32)
    if kind == "own":
        sync, forward = pe.GradSync(model, accumulate=2), model
    else:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=kind == "attach-view")
        sync = pe.attach(forward, accumulate=2)
    forward = torch.compile(forward, backend="aot_eager")
    for number, window in enumerate(sync.windows([integers(10 * rank + k) for k in range(6)])):
        for x, t in window:
            sync.backward(forward(x, t), count=3)
        sync.unscale_()
        batches = [integers(10 * r + 2 * number + k) for r in range(world) for k in range(2)]
        assert_same(grads(model), mean_of_integers(model, batches, 6 * world))
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("kind", ["own", "attach", "attach-view"])
def test_compiled_models_are_reduced_exactly(ranks, kind):
    ranks(2).run(_compiled, kind)


def _single_gradient(wire: pe.wire.Wire) -> float:
    """What torch.compile's python_reducer does: one (gradient, parameter) at a time,
    the result taken in place.
    """
    rank, _ = me()
    state = pe.HookState(wire=wire)
    param = nn.Parameter(torch.zeros(2, 3))
    grad = torch.full((2, 3), float(rank + 1))
    pe.comm_hook(state, (grad, param))
    return grad.mean().item()


@pytest.mark.parametrize("wire", [pe.wire.FP32(), pe.wire.BF16()], ids=["fp32", "bf16"])
def test_the_hook_takes_single_gradients_in_place(ranks, wire):
    assert ranks(2).run(_single_gradient, wire) == [1.5, 1.5]


TRAIN = """
import sys, warnings
if {blocked}:
    sys.modules["pyengine.ops._core"] = None
warnings.simplefilter("ignore")
import hashlib, torch, pyengine as pe
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
model.to(torch.{dtype})
sync = pe.GradSync(model, accumulate=3, wire=pe.wire.{wire}())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for window in sync.windows([torch.randn(4, 30).to(torch.{dtype}) for _ in range(8)]):
    for x in window:
        sync.backward(model(x).float().square().sum(), count=4)
    sync.clip_grad_norm_(0.5)
    sync.step(optimizer)
bits = b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())
print(hashlib.sha256(bits).hexdigest())
"""


def _train(blocked: bool, dtype: str, wire: str) -> str:
    code = TRAIN.format(blocked=blocked, dtype=dtype, wire=wire)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, wire", [("bfloat16", "BF16"), *rest(("float32", "FP32"), ("float32", "FP16"))]
)
def test_training_without_the_extension_gives_the_same_bits(dtype, wire):
    assert _train(True, dtype, wire) == _train(False, dtype, wire)
