"""torch.compile and builds without the extension: the same gradients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import forked
import pytest
import torch
from cases import Integers, me, windows_of_integers
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "attach-view", "attach-compiled"])
@on_ranks(2)
def test_compiled_models_are_reduced_exactly(kind):
    torch._dynamo.reset()
    model = Integers(torch.float32)
    if kind == "own":
        sync, forward = pe.GradSync(model, accumulate=2), torch.compile(model, backend="aot_eager")
    else:
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        forward = torch.compile(ddp_model, backend="aot_eager")
        sync = pe.attach(ddp_model if kind == "attach-view" else forward, accumulate=2)
    windows_of_integers(sync, forward, model)


def test_parameters_of_a_compiled_model_keep_their_names():
    model = nn.Linear(2, 2)
    state = pe.GradSync(torch.compile(model)).state_dict()
    pe.GradSync(model).load_state_dict(state)


class _Forwards(nn.Module):
    """A wrapper that forwards attributes of the wrapped module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 1)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_a_wrapper_around_a_compiled_model_is_not_taken_for_one():
    sync = pe.GradSync(_Forwards(torch.compile(nn.Linear(2, 2))))
    assert {slot.name for bucket in sync.layout.buckets for slot in bucket.slots} >= {"head.weight"}


@pytest.mark.parametrize("wire", [pe.wire.FP32(), pe.wire.BF16()], ids=["fp32", "bf16"])
@on_ranks(2)
def test_the_hook_takes_single_gradients_in_place(wire):
    """torch.compile's python_reducer passes one (gradient, parameter) pair at a time."""
    rank, _ = me()
    state = pe.HookState(wire=wire)
    param = nn.Parameter(torch.zeros(2, 3))
    grad = torch.full((2, 3), float(rank + 1))
    pe.comm_hook(state, (grad, param))
    assert grad.mean().item() == 1.5


TRAIN = """
import sys, warnings
if {blocked}:
    sys.modules["pyengine.ops._core"] = None
warnings.simplefilter("ignore")
import hashlib, torch, pyengine as pe
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
model.to(torch.bfloat16)
sync = pe.GradSync(model, accumulate=3, wire=pe.wire.BF16())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for window in sync.windows([torch.randn(4, 30).bfloat16() for _ in range(8)]):
    for x in window:
        sync.backward(model(x).float().square().sum(), count=4)
    sync.clip_grad_norm_(0.5)
    sync.step(optimizer)
bits = b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())
print(hashlib.sha256(bits).hexdigest())
"""


@pytest.mark.slow
def test_training_without_the_extension_gives_the_same_bits(tmp_path):
    without = [sys.executable, "-c", TRAIN.format(blocked=True)]
    digest = subprocess.run(without, capture_output=True, text=True, check=True).stdout
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(blocked=False))
    assert digest and digest == forked.python(str(script), cwd=tmp_path).stdout
