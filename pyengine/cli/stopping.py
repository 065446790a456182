"""SIGINT and SIGTERM end a command with one line on stderr and the exit code 128 + signal number.

`pyengine/__init__.py` imports this module before slow imports, so this module itself imports little.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def at_start() -> None:
    """Make SIGINT and SIGTERM end this process immediately while it is starting.

    No exception is raised, because some unfinished imports would swallow the exception. Workers of torchrun
    end silently, even inside a collective, because torchrun reports the signal.
    """
    for number in _not_ignored():
        signal.signal(number, signal.SIG_DFL if _is_torchrun_worker() else _exit)


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt or SystemExit in the body on a signal, and ignore further signals.

    After the body, a process that has called `at_start` also ignores signals, because all that remains is to
    exit.
    """
    if _is_torchrun_worker() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _not_ignored()}
    for number in before:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is _exit else handler)


def report(stop: KeyboardInterrupt | SystemExit, text: str) -> int:
    """Print the signal that ended a command and return the exit code; raise `stop` if no signal ended it."""
    code = 128 + signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.code
    if not isinstance(code, int) or code - 128 not in {*_WORDS, signal.SIGHUP, signal.SIGQUIT}:
        raise stop
    _print(signal.Signals(code - 128), text)
    return code


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    _ignore_signals()
    _print(signal.Signals(number), "nothing had begun")
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    _ignore_signals()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _ignore_signals() -> None:
    for number in _WORDS:
        signal.signal(number, signal.SIG_IGN)


def _print(number: signal.Signals, text: str) -> None:
    if _is_torchrun_worker() and os.environ.get("RANK") != "0":
        return
    with suppress(OSError):  # the terminal may have been closed
        print(f"{_WORDS.get(number, 'ended by ' + number.name)}: {text}", file=sys.stderr, flush=True)


def _not_ignored() -> list[signal.Signals]:
    """Return the signals that are not ignored; a shell's background jobs ignore SIGINT."""
    return [number for number in _WORDS if signal.getsignal(number) is not signal.SIG_IGN]


def _is_torchrun_worker() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
