"""A header whose own checksum fits and that is none of pyengine's is damage, too."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from pyengine.engine.checkpoint import state_file

GOOD = {"format": 1, "step": 1, "rank": 0, "world_size": 1, "save": "x", "bytes": 0, "crc32": 0}


def _check(tmp_path: Any, said: Any) -> state_file.Origin:
    text = json.dumps(said).encode()
    path = tmp_path / "file"
    path.write_bytes((state_file._MAGIC + b"%08x " % zlib.crc32(text) + text).ljust(255) + b"\n")
    return state_file.check(path)


def test_a_whole_header_is_read(tmp_path):
    assert _check(tmp_path, GOOD) == state_file.Origin(1, 0, 1, "x")


@pytest.mark.parametrize("said", [None, 3, [], {}, *({**GOOD, name: None} for name in GOOD)], ids=str)
def test_a_header_of_anything_else_is_damaged(tmp_path, said):
    with pytest.raises(ValueError, match="^damaged in its header"):
        _check(tmp_path, said)


def test_a_newer_format_may_have_other_fields(tmp_path):
    with pytest.raises(state_file.NewerFormat, match="of format 2"):
        _check(tmp_path, {"format": 2})
