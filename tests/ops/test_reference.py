"""Every op has the bits of plain PyTorch, on every instruction set, number of threads and device.

Without the native core, plain PyTorch runs, with exactly one warning.
"""

import subprocess
import sys

import pytest
import torch
from cuda_cases import (
    PLANS,
    EveryOp,
    Host,
    Reference,
    accumulate,
    accumulate_cast,
    assert_same,
    on_host,
    pack,
    pack_and_unpack_if,
    unpack,
    unscale_norm,
)
from op_cases import DTYPES, NAN, make_flat, make_plan

from pyengine.ops import native

FIRST = [True, False]
# Numbers of elements by which the tensors and the flat buffer are moved from an aligned address: different
# numbers, then equal ones, which include half of a 16-byte access in every dtype.
SHIFTS = [(1, 0), (0, 0), (1, 1), (2, 2), (4, 4)]

on_plans = pytest.mark.parametrize("layout", PLANS.values(), ids=PLANS)
shifted = pytest.mark.parametrize("shifts", SHIFTS, ids=str)


@on_plans
@shifted
@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", DTYPES)
@pytest.mark.parametrize("op", [pack, unpack])
def test_pack_and_unpack_equal_the_reference(anywhere, op, src, dst, shifts, layout, scale):
    arguments = layout, src, dst, shifts, scale
    assert_same(op(anywhere, *arguments), op(Reference(), *arguments))


@on_plans
@pytest.mark.parametrize("only_if", [0.0, 1.0, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_if_it_is_not_zero_anything_is_written(anywhere, dtype, only_if, layout, scale):
    arguments = layout, dtype, torch.tensor(only_if), scale
    got = pack_and_unpack_if(anywhere, *arguments)
    assert_same(got, pack_and_unpack_if(Reference(), *arguments))
    assert torch.equal(got[0].cpu(), make_flat(layout, torch.float32)) == (only_if == 0)


@on_plans
@shifted
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_equals_the_reference(anywhere, dtype, first, shifts, layout, scale):
    arguments = layout, dtype, first, shifts, scale
    assert_same(accumulate(anywhere, *arguments), accumulate(Reference(), *arguments))


@on_plans
@shifted
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("wire", [*DTYPES, "acc"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_cast_equals_the_reference(anywhere, dtype, wire, first, shifts, layout, scale):
    arguments = layout, dtype, wire, first, shifts, scale
    assert_same(accumulate_cast(anywhere, *arguments), accumulate_cast(Reference(), *arguments))


@shifted
@pytest.mark.parametrize("out", [None, "in place", *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_norm_equals_the_reference(anywhere, dtype, out, shifts, scale):
    arguments = PLANS["odd offsets"], dtype, out, shifts, scale
    assert_same(unscale_norm(anywhere, *arguments), unscale_norm(Reference(), *arguments))


@pytest.mark.parametrize("numels", [[5 * 2**20 + 3, 40_001, 1], [100_000, 3, 65_536, 0, 70_001]], ids=str)
def test_any_number_of_threads_gives_the_same_bits(threads, numels):
    both = [EveryOp(where, make_plan(numels)) for where in (Host(), Reference())]
    for ops in both:
        ops.grads[0][-1] = NAN
        ops.run()
    assert_same(*(ops.results for ops in both))
    assert both[0].seen.tolist() == [1] + [0] * (len(numels) - 1)


# Blocking the import has the same effect as a build without the extension.
WITHOUT_CORE = """
import sys, warnings
sys.modules["pyengine.ops._core"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pyengine.ops.plan
    at_import = len(caught)
    sys.path.insert(0, sys.argv[1])
    from cuda_cases import make_plan, on_host
    results = on_host(make_plan())
    messages = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
import pytest
import torch
torch.save((results, at_import, messages), sys.argv[2])
"""


@pytest.mark.slow
def test_without_the_core_one_warning_at_first_use_and_the_same_bits(tmp_path):
    saved = tmp_path / "results.pt"
    folder = __file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", WITHOUT_CORE, folder, str(saved)], check=True, timeout=120)
    results, at_import, messages = torch.load(saved)
    assert at_import == 0
    assert len(messages) == 1 and "ops are slower" in messages[0]
    assert_same(on_host(make_plan()), results)


def test_an_import_from_the_current_folder_is_hidden_by_no_other(monkeypatch):
    monkeypatch.chdir(native.FOLDER.parents[1])
    monkeypatch.setattr(sys, "path", [""])
    assert native.hidden_installation() == ""
