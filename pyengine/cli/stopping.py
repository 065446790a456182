"""SIGINT and SIGTERM: one line on stderr and 128 + the signal as exit code, from the first import on.

`pyengine/__init__.py` imports this before what takes seconds, so it imports next to nothing itself.
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
    """Let a signal end this process at once, as long as it has begun nothing and started nobody.

    An exception would pass through imports that are half done, some of which swallow it. Workers of torchrun
    end without a word, and in a collective too: torchrun speaks.
    """
    for number in _heeded():
        signal.signal(number, signal.SIG_DFL if _is_torchruns() else _exit)


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt or SystemExit in the body at a signal; a second one while it ends is ignored.

    Behind the body nothing is left to stop in a process that `at_start` was called in: signals are ignored
    there, while the interpreter ends.
    """
    if _is_torchruns() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _heeded()}
    for number in before:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is _exit else handler)


def told(stop: KeyboardInterrupt | SystemExit, text: str) -> int:
    """Say in one line which signal has ended a command, and return its exit code.

    Raises:
        SystemExit: it was no signal.
    """
    code = 128 + signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.code
    if not isinstance(code, int) or code - 128 not in {*_WORDS, signal.SIGHUP, signal.SIGQUIT}:
        raise stop
    _say(signal.Signals(code - 128), text)
    return code


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    _ignore()
    _say(signal.Signals(number), "nothing had begun")
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    _ignore()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _ignore() -> None:
    for number in _WORDS:
        signal.signal(number, signal.SIG_IGN)


def _say(number: signal.Signals, text: str) -> None:
    if _is_torchruns() and os.environ.get("RANK") != "0":
        return
    with suppress(OSError):  # a terminal that was closed
        print(f"{_WORDS.get(number, 'ended by ' + number.name)}: {text}", file=sys.stderr, flush=True)


def _heeded() -> list[signal.Signals]:
    """Return those that are not ignored: a shell's background jobs are not interrupted."""
    return [number for number in _WORDS if signal.getsignal(number) is not signal.SIG_IGN]


def _is_torchruns() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
