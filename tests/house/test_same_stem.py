"""Every op has the same stem in all file names."""

from pages import ROOT

STEMS = ["pack", "accumulate", "unscale_norm", "exact", "codec"]
PLACES = [
    "csrc/cpu/{}.cpp",
    "csrc/cuda/{}.cu",
    "tests/ops/test_{}.py",
    "benchmarks/kernels/{}.py",
]


def test_an_op_has_its_stem_in_every_place():
    places = [place.format(stem) for stem in STEMS for place in PLACES]
    assert [place for place in places if not (ROOT / place).is_file()] == []
