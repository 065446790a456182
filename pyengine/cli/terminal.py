"""Terminal output: unencodable characters, JSON lines, and outputs that are closed or have no space left."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyengine.telemetry import without_nan

_CLOSED = 141  # 128 + SIGPIPE, the exit code that a shell reports for `command | head`.
_RAISING = ("strict", "surrogateescape")  # Python sets "surrogateescape" in the C locale.
_PLAIN = {"×": "x", "→": "->", "–": "-", "±": "+-", "√": "sqrt ", "Σ": "sum ", "\u00a0": " "}


def prepare_output() -> None:
    """Make stdout replace characters that it cannot encode, and stderr if it would raise an error.

    Each character is replaced by a similar character (`x` for `×`) or by `?`. If stdout is closed, nothing is
    printed. Every process that prints must call this function.
    """
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    codecs.register_error("pyengine.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _RAISING:
            stream.reconfigure(errors="pyengine.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # the handler is used only for output
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in text), error.end


def show_cursor() -> None:
    """Show the cursor, which a worker leaves hidden if it is killed while drawing its live line."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")


def print_json(event: str, **values: Any) -> None:
    """Print a JSON object on one line; inf and nan, which JSON does not support, become null."""
    print(json.dumps({"event": event, **without_nan(values)}), flush=True)


def read_json(text: str | bytes) -> Any:
    """Parse the JSON of an untrusted file, and replace control characters with `?`.

    Control characters could move the cursor of a terminal.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return _printable(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(sign if sign.isprintable() or sign in "\n\t" else "?" for sign in value)
    if isinstance(value, dict):
        return {_printable(name): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


@contextmanager
def ends_with_output() -> Iterator[None]:
    """End this worker if its output is closed or has no space left.

    If the output is closed, SIGPIPE ends the worker, as it ends other programs.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) and not _is_closed(sys.stdout.fileno()):
            raise  # the error comes from another pipe
        code = exit_code(error)
        if code == _CLOSED:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)
        if code is not None:
            sys.exit(code)
        raise


def _is_closed(pipe: int) -> bool:
    """Return whether a pipe no longer has a reader."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def exit_code_of_worker(error: RuntimeError) -> int | None:
    """Return the exit code if an error from `launch` says that a worker's output was closed, else None."""
    return exit_code(BrokenPipeError()) if "\nSignal 13 (SIGPIPE)" in str(error) else None


def exit_code(error: OSError) -> int | None:
    """Return the exit code of a command whose output was closed or has no space left; None for other errors.

    The function also redirects stdout to the null device, so that the interpreter does not fail at exit.
    """
    if isinstance(error, BrokenPipeError):
        code = _CLOSED
    elif error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO) and error.filename is None:
        print(f"cannot write the output: {error.strerror}", file=sys.stderr)
        code = 1
    else:
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
