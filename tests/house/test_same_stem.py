"""Every op has one stem in every place, so that one word finds all of it."""

import pytest
from pages import ROOT

STEMS = ["pack", "accumulate", "unscale_norm", "exact", "codec"]
PLACES = [
    "csrc/cpu/{}.cpp",
    "csrc/cuda/{}.cu",
    "tests/ops/test_{}.py",
    "pyengine/cli/bench/kernels/{}.py",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stem", STEMS)
def test_an_op_has_its_stem_in_every_place(stem, place):
    assert (ROOT / place.format(stem)).is_file(), f"{place.format(stem)} is missing"


@pytest.mark.parametrize("stem", STEMS)
def test_an_op_is_bound_by_its_stem(stem):
    assert f"void bind_{stem}(" in (ROOT / "csrc" / "python.cpp").read_text()
