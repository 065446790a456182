"""Without the native core: the same bits, and exactly one warning."""

import subprocess
import sys

import torch
from op_cases import assert_same_bits, clone, flags, make_flat, make_plan, make_tensors, sums

# Blocking the import is what a build without the extension looks like from inside.
WITHOUT_CORE = """
import sys, warnings
sys.modules["pyengine.ops._core"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pyengine.ops.plan
    at_import = len(caught)
    sys.path.insert(0, sys.argv[1])
    import test_reference
    results = test_reference.run_every_op()
    messages = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
import torch
torch.save((results, at_import, messages), sys.argv[2])
"""


def run_every_op() -> list[torch.Tensor]:
    plan, scale, one = make_plan(), torch.tensor(0.3), torch.tensor(1.0)
    grads, acc = make_tensors(plan, torch.bfloat16), make_flat(plan, torch.float32)
    wire, back, sumsq, nonfinite = make_flat(plan, torch.float16), clone(grads), sums(plan), flags(plan)
    plan.accumulate_(acc, grads, scale, first=True, nonfinite=nonfinite)
    plan.accumulate_(acc, grads, one, first=False, nonfinite=nonfinite)
    plan.accumulate_cast_(wire, acc, grads, one, scale, first=False, nonfinite=nonfinite)
    plan.unpack_(back, wire, scale)
    plan.unscale_norm(back, back, scale, sumsq=sumsq, nonfinite=nonfinite)
    plan.pack_(wire, back, scale)
    return [acc, wire, sumsq, nonfinite, *[t for t in back if t is not None]]


def test_without_the_core_one_warning_at_first_use_and_the_same_bits(tmp_path):
    saved = tmp_path / "results.pt"
    folder = __file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", WITHOUT_CORE, folder, str(saved)], check=True, timeout=120)
    results, at_import, messages = torch.load(saved)
    assert at_import == 0
    assert len(messages) == 1 and "pip install" in messages[0]
    for got, want in zip(run_every_op(), results, strict=True):
        assert_same_bits(got, want)
