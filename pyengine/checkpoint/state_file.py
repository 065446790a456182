"""One file of a checkpoint: whole and unchanged, or refused with the reason."""

from __future__ import annotations

import json
import os
import stat
import uuid
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pyengine.checkpoint.loading import check_loads, check_tensors, load, naming_foreign

FORMAT = 1

_MAGIC = b"pyengine checkpoint\n"
_HEADER_BYTES = 256  # the magic, a checksum of the rest, JSON, blanks
_FIELDS = {"step": int, "rank": int, "world_size": int, "save": str, "bytes": int, "crc32": int}
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Origin:
    """Which part of which save a file is."""

    step: int
    rank: int
    world_size: int
    save: str  # identifies this save among those of the same step; the same on every rank
    is_first: bool = False  # whether no step was there before it


def write(path: Path, origin: Origin, state: Any) -> None:
    """Write a file that is there as a whole, on the disk, or not at all; one that is there is replaced.

    Raises ValueError if `read` could not give the state again.
    """
    # A name that cannot be guessed, and only a new file: "x" follows no link that another user has put there.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("x+b") as file:
            file.write(b" " * _HEADER_BYTES)
            payload = _Summed(file)
            with naming_foreign(state):
                check_tensors(state)
                torch.save(state, payload)  # type: ignore[arg-type]
                file.seek(_HEADER_BYTES)
                check_loads(file)
            fields = {"format": FORMAT, **asdict(origin), "bytes": payload.num_bytes, "crc32": payload.crc}
            file.seek(0)
            text = json.dumps(fields).encode()
            file.write((_MAGIC + b"%08x " % zlib.crc32(text) + text).ljust(_HEADER_BYTES - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def check(path: Path) -> Origin:
    """Read a file once and return what it is.

    Raises ValueError if it is truncated, damaged, something else, or of a newer pyengine (`NewerFormat`); the
    message says which, without the name.
    """
    with _open(path) as file:
        fields = _header(file.read(_HEADER_BYTES))
        num_bytes, crc = os.fstat(file.fileno()).st_size - _HEADER_BYTES, 0
        if num_bytes != fields["bytes"]:
            raise ValueError(f"truncated: it holds {num_bytes} of {fields['bytes']} bytes of a state")
        while piece := file.read(_PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    if crc != fields["crc32"]:
        raise ValueError("damaged: its checksum is that of other bytes")
    is_first = fields.get("is_first", False)
    return Origin(fields["step"], fields["rank"], fields["world_size"], fields["save"], is_first)


def read(path: Path) -> Any:
    """Return the state in a file that has been checked, on the CPU; raise as `load`."""
    with _open(path) as file:
        file.seek(_HEADER_BYTES)
        return load(file)


class NewerFormat(ValueError):
    """A file that a newer pyengine wrote."""


def _header(head: bytes) -> dict[str, Any]:
    if not head.startswith(_MAGIC):
        is_torn = len(head) < len(_MAGIC) or not head.strip(b"\0 ")
        raise ValueError("truncated: it has no header" if is_torn else "no checkpoint of pyengine")
    crc, _, text = head[len(_MAGIC) :].rstrip().partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        raise ValueError("truncated or damaged in its header")
    found: Any = json.loads(text)
    is_ours = isinstance(found, dict) and type(found.get("format")) is int
    if is_ours and found["format"] > FORMAT:
        raise NewerFormat(f"of format {found['format']}, and this pyengine reads up to {FORMAT}: update it")
    if (
        not is_ours
        or any(type(found.get(name)) is not kind for name, kind in _FIELDS.items())
        or type(found.get("is_first", False)) is not bool
    ):
        raise ValueError("damaged in its header, which has not the fields that pyengine writes")
    fields: dict[str, Any] = found
    return fields


def _open(path: Path) -> BinaryIO:
    """Open a regular file; the open of a pipe would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("no regular file")
    return os.fdopen(descriptor, "rb")


def sync_folder(folder: Path) -> None:
    """Let the names in a folder be on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Summed:
    """A file that adds up what is written: `torch.save` writes from front to back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        written = self._file.write(data)
        self.num_bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()
