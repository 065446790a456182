"""Without the native core: the same bits, and exactly one warning."""

import subprocess
import sys

import pytest
import torch
from cuda_cases import assert_same, on_host
from op_cases import make_plan

# Blocking the import is what a build without the extension looks like from inside.
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
    assert len(messages) == 1 and "pip install" in messages[0]
    assert_same(on_host(make_plan()), results)
