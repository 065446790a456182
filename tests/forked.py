"""Run Python programs as `subprocess.run` would, in a fork of a process that has imported torch.

Otherwise, a program that starts two workers imports torch three times, which takes 14 s of CPU time. The
workers that `pe.launch` starts are forks of the same server. Tests of how a process starts (signals of the
terminal, torchrun, imports) need `subprocess`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.multiprocessing

from pyengine.comm import launching

# Modules that many tests import, or that torch imports late. None starts a thread, which a fork would lose.
_PRELOADED = [
    "numpy", "pytest", "torch", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.nn.parallel", "torch.testing",
    "pyengine.audit.handle", "pyengine.engine.attach", "pyengine.engine.grad_sync",
]  # fmt: skip


def context() -> Any:
    """Return the multiprocessing context whose processes are forks of one server per test session."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(_PRELOADED)
    return made


def python(*command: str, cwd: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run `python *command` to its end; return its exit code and its output.

    Args:
        command: a script with its arguments, or "-m" and a module with its arguments.
        cwd: the working directory.
        timeout_s: the process is killed after this time, and the test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        process = context().Process(target=_run, args=(command, cwd, printed))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(
                command, timeout_s, printed[0].read_text(), printed[1].read_text()
            )
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in printed))


def _run(command: tuple[str, ...], cwd: Path, printed: list[Path]) -> None:
    _print_to(printed)
    os.chdir(cwd)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - until the end of the process
    _fork_workers(printed)
    if "study" in command:
        fork_runs(setattr)
    if command[0] == "-m":
        sys.argv = [command[1], *command[2:]]
        sys.path[0] = str(cwd)
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def _print_to(files: list[Path]) -> None:
    """Redirect stdout and stderr, which the process has inherited from the server, to files."""
    for fd, path in zip((1, 2), files, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)


def _fork_workers(printed: list[Path]) -> None:
    """Let `pe.launch` fork its workers from the server."""
    forkserver._forkserver.ensure_running = lambda: None  # it would start another server
    launching.start_processes = lambda fn, args, **settings: start_processes(
        _work, (printed, fn, args), **settings
    )


def fork_runs(patch: Callable[[Any, str, Any], None]) -> None:
    """Also fork the processes of a study's runs; `patch` is `setattr` or `monkeypatch.setattr`."""
    from pyengine.cli.study import supervise

    patch(supervise, "mp", SimpleNamespace(get_context=lambda method: context()))
    patch(supervise, "_child", _launch_run)


def _launch_run(run: Any, result: str, log: str, parent: int) -> None:
    from pyengine.cli.study import supervise

    # Fork from this process and not from the server, so that workers belong to this process's session.
    launching.start_processes = lambda fn, args, **settings: torch.multiprocessing.start_processes(
        fn, args, **(settings | {"start_method": "fork"})
    )
    supervise._child(run, result, log, os.getppid())  # its parent is the server


def start_processes(fn: Any, args: tuple[Any, ...], *, start_method: str, **settings: Any) -> Any:
    """Start processes as torch does, but fork them from the server instead of spawning them."""
    context()
    method = "forkserver" if start_method == "spawn" else start_method
    return torch.multiprocessing.start_processes(fn, args, start_method=method, **settings)


def _work(index: int, printed: list[Path], fn: Any, args: tuple[Any, ...]) -> None:
    _print_to(printed)
    fn(index, *args)
