"""One file of a checkpoint, and what may be found in its place: a foreign header, a pipe, a link."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import numpy
import pytest
import torch

from pyengine.checkpoint import state_file

GOOD = {"format": 1, "step": 1, "rank": 0, "world_size": 1, "save": "x", "bytes": 0, "crc32": 0}


def _check(tmp_path: Any, said: Any) -> state_file.Origin:
    text = json.dumps(said).encode()
    path = tmp_path / "file"
    path.write_bytes((state_file._MAGIC + b"%08x " % zlib.crc32(text) + text).ljust(255) + b"\n")
    return state_file.check(path)


@pytest.mark.parametrize(
    "said", [None, 3, [], {}, *({**GOOD, name: None} for name in [*GOOD, "is_first"])], ids=str
)
def test_a_header_of_anything_else_is_damaged(tmp_path, said):
    with pytest.raises(ValueError, match="^damaged in its header"):
        _check(tmp_path, said)


def test_a_newer_format_may_have_other_fields(tmp_path):
    with pytest.raises(state_file.NewerFormat, match="of format 2"):
        _check(tmp_path, {"format": 2})


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "file"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # so that it has something to read, should it be read
    os.write(writer, b"x" * 300)
    with pytest.raises(ValueError, match="^no regular file"):
        state_file.check(path)
    os.close(writer)


def test_a_link_with_the_name_of_a_part_is_not_written_through(tmp_path):
    path, victim = tmp_path / "one.pt", tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".one.pt.part").symlink_to(victim)
    state_file.write(path, state_file.Origin(1, 0, 1, "x"), {"a": 1})
    assert victim.read_text() == "mine" and state_file.read(path) == {"a": 1}


def test_what_read_would_refuse_is_not_written(tmp_path):
    path = tmp_path / "one.pt"
    with pytest.raises(
        ValueError, match=r"^state\['lr'\]\[0\] is a numpy\.float64, which does not load again: save "
    ):
        state_file.write(path, state_file.Origin(1, 0, 1, "x"), {"lr": [numpy.float64(0.1)]})
    with pytest.raises(ValueError, match=r"^state\['a'\] is a tensor of layout torch.sparse_csr"):
        state_file.write(path, state_file.Origin(1, 0, 1, "x"), {"a": torch.eye(2).to_sparse_csr()})
    assert not list(tmp_path.iterdir())
