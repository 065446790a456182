"""What `make aarch64` compares: every op of the core, run without torch, has the same bits everywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from pyengine.ops import native

FOLDER = Path(__file__).parents[1] / "aarch64"


@pytest.fixture(scope="module")
def digests() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        import digests
    finally:
        sys.path.remove(str(FOLDER))
    return digests


def _public(of: object) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def test_every_op_of_the_core_is_among_them(digests: ModuleType) -> None:
    source, core = (FOLDER / "digests.py").read_text(), native.core()
    cuda = {name for name in dir(core) if "cuda" in name.lower()}
    cuda |= {"INLINE_SLOTS", "MOST_INLINE_SLOTS", "load_kernels", "uploaded"}
    questions = {"first_moved", "num_words", "write_words", "is_disjoint", "is_outside"}
    ops = _public(core) - cuda - digests.UNTESTED
    ops |= {name for name in _public(core.BucketPlan) - questions if not name.endswith("_apart")}
    assert [name for name in sorted(ops) if f".{name}(" not in source] == []


@pytest.mark.slow
def test_they_are_the_same_on_every_instruction_set(digests: ModuleType) -> None:
    core = native.core()
    before = core.isa()
    own = list(digests.lines(core))
    assert core.set_isa("generic")
    try:
        assert list(digests.lines(core)) == own and len(own) > 100
    finally:
        core.set_isa(before)
