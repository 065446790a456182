"""One file of a checkpoint: whole and unchanged, or refused with the reason."""

from __future__ import annotations

import io
import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

FORMAT = 1

_MAGIC = b"pyengine checkpoint\n"
_HEADER_BYTES = 256  # the magic, a checksum of the rest, JSON, blanks
_FIELDS = {"step": int, "rank": int, "world_size": int, "save": str, "bytes": int, "crc32": int}
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Origin:
    """Which part of which save a file is.

    Attributes:
        step: of the save.
        rank, world_size: whose part, of how many.
        save: what tells this save from every other one of the same step; the same on every rank.
        is_first: whether no step was there before it.
    """

    step: int
    rank: int
    world_size: int
    save: str
    is_first: bool = False


def write(path: Path, origin: Origin, state: Any) -> None:
    """Write a file that is there as a whole, on the disk, or not at all.

    Args:
        path: of the file; one that is there is replaced.
        origin: kept in it.
        state: what `torch.save` takes and `torch.load` gives with `weights_only=True`.

    Raises:
        OSError: it could not be written; nothing has changed but that a file of the name `part_of(path)` may
            be there.
    """
    part = part_of(path)
    with part.open("wb") as file:
        file.write(b" " * _HEADER_BYTES)
        payload = _Summed(file)
        torch.save(state, payload)  # type: ignore[arg-type]
        said = {"format": FORMAT, **asdict(origin), "bytes": payload.num_bytes, "crc32": payload.crc}
        file.seek(0)
        text = json.dumps(said).encode()
        file.write((_MAGIC + b"%08x " % zlib.crc32(text) + text).ljust(_HEADER_BYTES - 1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync_folder(path.parent)


def part_of(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(f".{path.name}.part")


def check(path: Path) -> Origin:
    """Read a file once and return what it is.

    Raises:
        NewerFormat: a newer pyengine wrote it.
        ValueError: it is truncated, damaged, or something else; the message says which, without the name.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        said = _header(file.read(_HEADER_BYTES))
        crc = num_bytes = 0
        while piece := file.read(_PIECE_BYTES):
            crc, num_bytes = zlib.crc32(piece, crc), num_bytes + len(piece)
    if num_bytes != said["bytes"]:
        raise ValueError(f"truncated: it holds {num_bytes} of {said['bytes']} bytes of a state")
    if crc != said["crc32"]:
        raise ValueError("damaged: its checksum is that of other bytes")
    return Origin(said["step"], said["rank"], said["world_size"], said["save"], said.get("is_first", False))


def read(path: Path) -> Any:
    """Return the state in a file that has been checked, on the CPU."""
    with path.open("rb") as file:
        return torch.load(_Payload(file), map_location="cpu", weights_only=True)  # type: ignore[arg-type]


class NewerFormat(ValueError):
    """A file that a newer pyengine wrote."""


def _header(head: bytes) -> dict[str, Any]:
    if not head.startswith(_MAGIC):
        is_torn = len(head) < len(_MAGIC) or not head.strip(b"\0 ")
        raise ValueError("truncated: it has no header" if is_torn else "no checkpoint of pyengine")
    crc, _, text = head[len(_MAGIC) :].rstrip().partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        raise ValueError("truncated or damaged in its header")
    said: Any = json.loads(text)
    is_ours = isinstance(said, dict) and type(said.get("format")) is int
    if is_ours and said["format"] > FORMAT:
        raise NewerFormat(f"of format {said['format']}, and this pyengine reads up to {FORMAT}: update it")
    if not is_ours or any(type(said.get(name)) is not kind for name, kind in _FIELDS.items()):
        raise ValueError("damaged in its header, which has not the fields that pyengine writes")
    fields: dict[str, Any] = said
    return fields


def _sync_folder(folder: Path) -> None:
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


class _Payload(io.RawIOBase):
    """A file from behind its header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.seek(_HEADER_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)  # type: ignore[attr-defined, no-any-return]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        ahead = _HEADER_BYTES if whence == io.SEEK_SET else 0
        return self._file.seek(offset + ahead, whence) - _HEADER_BYTES

    def tell(self) -> int:
        return self._file.tell() - _HEADER_BYTES
