"""`launch` where no function can be imported: a notebook, an interactive session, `python -c`, a pipe."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from marks import rest

import pyengine as pe
from pyengine.comm import launching

# The parent first uses torch's threads: OpenMP hangs in a forked process that uses them again.
SESSION = """
import torch, torch.distributed as dist, pyengine as pe

torch.set_num_threads(4)
x = torch.randn(500, 500, requires_grad=True)
(x @ x).exp().sum().backward()

class Result:
    def __init__(self, *values):
        self.values = values

def train(scale):
    weight = torch.nn.Parameter(torch.ones(300, 300))
    sync = pe.GradSync([weight], accumulate=2)
    for window in sync.windows(range(2)):
        for index in window:
            sync.backward((scale.values[0] * index * (weight @ weight)).sum(), count=1)
        sync.unscale_()
    return Result(dist.get_rank(), weight.grad.unique().tolist(), torch.get_num_threads())

results = pe.launch(train, workers=2, args=(Result(3),))
print([result.values for result in results], pe.launch(lambda: dist.get_rank(), workers=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["-", *rest("-c")])  # examples/quickstart.ipynb runs with -c
def test_functions_and_classes_of_a_session_work_in_forked_workers_of_one_thread(way):
    command = [sys.executable, way] + ([SESSION] if way == "-c" else [])
    done = subprocess.run(command, check=False, input=SESSION, capture_output=True, text=True, timeout=60)
    # The sum of w @ w has the gradient 600 everywhere; the mean of indices 0 and 1 is 1/2; the scale is 3.
    assert done.stdout == "[(0, [900.0], 1), (1, [900.0], 1)] [0, 1]\n", done.stderr


SCRIPT = """
import pyengine as pe
def fn():
    pass
pe.launch(fn, workers=2)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_ends_and_says_what_is_missing(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr  # multiprocessing's message
    assert "it exited by itself, before or inside fn; its output shows why" in done.stderr


@pytest.fixture
def session_function(monkeypatch):
    """Return a function of a `__main__` module that no other process can import."""

    def fn():
        """Do nothing."""

    main = ModuleType("__main__")
    main.fn, fn.__module__, fn.__qualname__ = fn, "__main__", "fn"
    monkeypatch.setitem(sys.modules, "__main__", main)
    return fn


def test_an_initialised_device_is_named_before_anything_is_forked(monkeypatch, session_function):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="^cuda has been initialised .* touch no device before launch"):
        pe.launch(session_function, workers=2)


def test_a_process_group_of_the_session_is_named(session_function):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            RuntimeError, match=r"^this process has a process group.*destroy_process_group\(\)"
        ):
            pe.launch(session_function, workers=2)
    finally:
        dist.destroy_process_group()


def test_a_platform_that_cannot_fork_is_named(monkeypatch, session_function):
    monkeypatch.setattr(launching, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(RuntimeError, match="cannot fork this process: put fn into a file of its own"):
        pe.launch(session_function, workers=2)


def test_what_can_be_imported_is_not_forked_from_a_session_either(monkeypatch, session_function):
    assert launching._start_method(session_function, ()) == "fork"
    assert launching._start_method(len, (session_function,)) == "fork"
    assert launching._start_method(len, ("abc",)) == "spawn"
