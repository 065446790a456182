"""The stream that commands print to: what it cannot show, JSON lines, and that it may be closed or full."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from typing import Any

_CLOSED = 141  # 128 + SIGPIPE, as a shell reports `command | head`
_RAISING = ("strict", "surrogateescape")  # the second is what Python sets in the C locale


def show_everything() -> None:
    """Let signs that stdout has no code for come out as `?`; every process that prints calls this."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _RAISING:
            stream.reconfigure(errors="replace")


def print_json(event: str, **values: Any) -> None:
    """Print an object on a line of its own, for programs; `event` says what it is."""
    print(json.dumps({"event": event, **values}), flush=True)


def read_json(text: str | bytes) -> Any:
    """Return the JSON of a file that anybody may have written, for a terminal: signs of its strings that are
    not printed, but move the cursor for example, are `?`.

    Raises:
        ValueError: the text is no JSON, or nested too deeply.
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


def flush() -> None:
    """Write what is still to be written while it can be told that this fails."""
    sys.stdout.flush()


def exit_code(error: OSError) -> int | None:
    """Return the exit code of a command whose output nobody takes or nothing holds; None if the error is
    another one.

    Output is thrown away from then on, so that the interpreter does not stumble over it again.
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
