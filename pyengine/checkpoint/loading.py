"""Files of unknown origin, read as data: no code runs, no tensor reaches beyond its memory."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_NEED = "save tensors and plain values: float(x) of a number, torch.as_tensor(x) of an array, for example"
_ZIP = b"PK\3\4"  # what torch.save begins with; torch.load reads other, older formats, too


def load(file: BinaryIO) -> Any:
    """Return what `torch.save` wrote from the file's position to its end, on the CPU.

    Raises ValueError if the file holds anything but tensors and plain values, a tensor that `check_tensors`
    refuses, or more bytes than it has; where the bytes are damaged, whatever torch raises.
    """
    _check_size(file)
    value = _unpickled(file, "cpu")
    check_tensors(value)
    return value


def check_loads(file: BinaryIO) -> None:
    """Raise ValueError if `load` could not read what `torch.save` has written; reads no tensor if it can."""
    start = file.tell()
    try:
        _unpickled(file, "meta")
    except Exception:  # noqa: BLE001 - a quantized tensor, for example
        file.seek(start)
        _unpickled(file, "cpu")


@contextmanager
def naming_foreign(state: Any) -> Iterator[None]:
    """Name what cannot be loaded again, where the body saves `state` or checks that it loads."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        for path, leaf in _leaves(state):
            if type(leaf) not in _PLAIN and not isinstance(leaf, Tensor):
                kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
                raise ValueError(f"state{path} is a {kind}, which does not load again: {_NEED}") from error
        raise


def check_tensors(value: Any) -> None:
    """Raise ValueError for a tensor, nested in containers, that reads outside of its memory or has no layout
    that can be checked.
    """
    for path, leaf in _leaves(value):
        if isinstance(leaf, Tensor) and (problem := tensor_problem(leaf)):
            raise ValueError(f"state{path} is {problem}")


def tensor_problem(tensor: Tensor) -> str:
    """Return why a tensor's elements cannot be read; empty if they can."""
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"a tensor of layout {tensor.layout}: save it as torch.strided or torch.sparse_coo"
    if tensor.layout is torch.sparse_coo and not tensor.is_meta:
        indices = tensor._indices()
        sizes = torch.tensor(tensor.shape[: tensor.sparse_dim()], dtype=torch.int64, device=indices.device)
        if indices.numel() and bool(((indices.amin(1) < 0) | (indices.amax(1) >= sizes)).any()):
            return f"a sparse tensor of shape {list(tensor.shape)} with indices outside of it"
    return ""


def _unpickled(file: BinaryIO, device: str) -> Any:
    try:
        with torch.device(device):  # sparse tensors are made on the default device
            return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = found[1] if found else "something"
        raise ValueError(
            f"the state holds {what}, which is neither a tensor nor a plain value, and may be code: {_NEED}"
        ) from error


def _check_size(file: BinaryIO) -> None:
    """Raise ValueError unless a file is, from here on, an archive that holds no more than its bytes."""
    start = file.tell()
    is_zip = file.read(len(_ZIP)) == _ZIP
    size = file.seek(0, os.SEEK_END) - start
    if not (is_zip and zipfile.is_zipfile(file)):
        raise ValueError("the state is not what torch.save writes: it is damaged, or of another program")
    with zipfile.ZipFile(file) as archive:
        held = sum(entry.file_size for entry in archive.infolist())
    if held > size:
        raise ValueError(f"the state holds {held} bytes in {size}: torch.save compresses nothing")
    file.seek(start)


def _leaves(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Return what is not a container, and its path; a container that is there twice, once."""
    seen = set() if seen is None else seen
    if not isinstance(value, dict | list | tuple | set) or isinstance(value, torch.Size):
        yield path, value
    elif id(value) not in seen:
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{path}[{key!r}]", seen)
