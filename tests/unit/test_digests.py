"""What `make aarch64` compares: every op of the core, run without torch, with the same bits everywhere."""

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


@pytest.mark.parametrize(
    ("dtype", "one", "other"), [(0, b"\0\0\xc0\x7f", b"\0\0\xc0\xff"), (2, b"\1\x7c", b"\0\xfe")]
)
def test_which_nan_it_is_does_not_matter_and_infinities_do(digests, dtype, one, other) -> None:
    infinity = one[:-2] + (b"\x80\x7f" if dtype == 0 else b"\0\x7c")
    first, second, third = (digests.Memory(each).digest_of(dtype) for each in (one, other, infinity))
    assert first == second != third
