"""Write a command's files completely or not at all, and never through a link; see SECURITY.md."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path; if the body succeeds, replace `path` with the file at that path.

    The temporary file has the same name and is in a folder that only this user can enter, so that nobody else
    can place a link there. A link at `path` itself is replaced, not followed.
    """
    with tempfile.TemporaryDirectory(prefix=".pyengine-", dir=path.parent) as folder:
        part = Path(folder, path.name)
        yield part
        part.replace(path)


def regular(path: str, flags: int) -> int:
    """Open a regular file, as an `opener` for `open`; raise OSError for a link, a pipe or a device."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for another process.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a symbolic link, which is not followed", path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def fresh(path: Path) -> TextIO:
    """Replace a file with a new text file, which other processes may read while it grows."""
    path.unlink(missing_ok=True)
    return path.open("x", encoding="utf-8")  # "x" does not follow links


def make_folder(path: Path) -> None:
    """Create a subfolder of a folder that the user named, if missing; raise OSError if it is a link."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link, which is not followed", str(path))
