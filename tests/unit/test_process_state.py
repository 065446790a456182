"""Processes of this machine are running, stopped or dead; the state of others is unknown."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyengine.comm import process_state
from pyengine.comm.process_state import ProcessId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it")

HERE = ProcessId.own()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def _of(pid: int) -> ProcessId:
    return replace(HERE, pid=pid, started=process_state._stat(pid)[1])


def _becomes(process: ProcessId, state: str) -> bool:
    end = time.monotonic() + 10
    while process.state(HERE) != state and time.monotonic() < end:
        time.sleep(0.001)
    return process.state(HERE) == state


def test_a_process_is_seen_as_it_is(child):
    process = _of(child.pid)
    assert HERE.state(HERE) == process.state(HERE) == "running"
    assert replace(process, started="1").state(HERE) == "dead"  # another process with the same pid
    assert replace(process, space="another machine").state(HERE) == "unknown"
    child.send_signal(signal.SIGSTOP)
    assert _becomes(process, "stopped")
    child.send_signal(signal.SIGCONT)
    assert _becomes(process, "running")
    child.kill()
    assert _becomes(process, "dead")  # a zombie, until its parent waits for it
    child.wait()
    assert process.state(HERE) == "dead"


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES])
def test_a_process_that_cannot_be_looked_at_is_not_dead(error, monkeypatch):
    def fail(*args: object, **kwargs: object) -> str:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "read_text", fail)
    assert HERE.state(HERE) == "unknown"


@pytest.mark.parametrize("hidden", ["/proc/sys", "/proc"])
def test_where_proc_hides_the_machine_nothing_is_known_of_any_process(hidden, monkeypatch):
    """With `mount -o subset=pid`, /proc shows nothing but processes."""

    def shows(path: object) -> None:
        if str(path).startswith(hidden):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    read_text, readlink = Path.read_text, os.readlink
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: shows(path) or read_text(path, **kw))
    monkeypatch.setattr(os, "readlink", lambda path: shows(path) or readlink(path))
    one, other = ProcessId.own(), ProcessId.own()
    assert one.state(other) == other.state(HERE) == "unknown"
    assert bool(process_state.own_network()) == (hidden != "/proc")
