"""Importing the package needs no torch_xla, and training on XLA needs no native core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_REFUSE = """
import sys, importlib.abc
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ImportError(name + " is refused by a test")
sys.meta_path.insert(0, Refuse())
"""
_TRAIN = """
import torch, torch_xla, pyengine as pe
from pyengine.ops import native
param = torch.nn.Parameter(torch.ones(3).to(torch_xla.device()))
sync = pe.GradSync([param], accumulate=2)
optimizer = torch.optim.SGD([param], lr=0.5)
for window in sync.windows([1.0, 2.0, 3.0]):
    for factor in window:
        sync.backward((param * factor).sum())
    sync.step(optimizer)
print(param.tolist(), native._core is not None)
"""


def _run(code: str, refused: set[str]) -> str:
    env = dict(os.environ, PJRT_DEVICE="CPU")
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", _REFUSE.format(names=refused) + code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_asks_for_no_torch_xla():
    assert _run("import pyengine; print(pyengine.__version__)", {"torch_xla"})


@pytest.mark.parametrize("refused", [{"pyengine.ops._core"}, set()], ids=["without core", "as installed"])
def test_training_needs_no_native_core_and_warns_of_none(refused):
    assert _run(_TRAIN, refused).startswith("[-1.25, -1.25, -1.25]")


def test_the_example_runs_as_it_is():
    example = Path(__file__).parents[2] / "examples" / "xla_loop.py"
    lines = _run(f"import runpy; runpy.run_path({str(example)!r}, run_name='__main__')", set()).splitlines()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if line.startswith("step ")]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
