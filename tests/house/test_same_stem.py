"""Every op has one stem in every place, so that one word finds all of it (STYLE.md)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEMS = ["pack", "accumulate", "unscale_norm", "exact", "codec"]
PLACES = [
    "csrc/cpu/{}.cpp",
    "csrc/cuda/{}.cu",
    "tests/ops/test_{}.py",
    "pyengine/cli/bench/kernels/{}.py",
]
# Sources and tests beside the ops that are not ops.
NOT_OPS = {
    "dispatch", "roof", "reference", "upload", "kernels", "cuda", "cuda_build", "cuda_calls",
    "cuda_emulator", "cuda_streams", "exact_accuracy", "exact_cuda", "functional", "checksum",
    "core_checksum", "codec_cuda", "sample", "shared_sum", "core_listener", "versions",
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stem", STEMS)
def test_an_op_has_its_stem_in_every_place(stem, place):
    path = ROOT / place.format(stem)
    assert path.is_file(), f"{path.relative_to(ROOT)} is missing"


@pytest.mark.parametrize("stem", STEMS)
def test_an_op_is_bound_by_its_stem(stem):
    assert f"void bind_{stem}(" in (ROOT / "csrc" / "python.cpp").read_text()


@pytest.mark.parametrize(
    ("folder", "prefix", "suffix"),
    [("csrc/cpu", "", ".cpp"), ("csrc/cuda", "", ".cu"), ("tests/ops", "test_", ".py")],
)
def test_no_file_is_named_after_an_op_that_does_not_exist(folder, prefix, suffix):
    found = {path.name[len(prefix) : -len(suffix)] for path in (ROOT / folder).glob(f"{prefix}*{suffix}")}
    assert found - NOT_OPS <= set(STEMS)
