"""The sanitizers of `make sanitize` are active: a deliberate error ends the process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized_core

from pyengine.ops import native

pytestmark = pytest.mark.skipif(not sanitized_core.is_sanitized(), reason="`make sanitize` runs this")

PACK = """
import sanitized_core, torch
from pyengine.ops import native
core = native.core()
tensor, flat, scale = torch.ones({numel}), torch.ones(8), torch.ones(2)
table = core.Table([tensor.data_ptr()], 0)
core.BucketPlan([0], [8]).pack_(flat.data_ptr(), 0, table, scale.data_ptr() + {shift}, 0)
"""


@pytest.mark.parametrize(
    ("numel", "shift", "said"),
    [(8, 0, "^$"), (7, 0, "AddressSanitizer: heap-buffer-overflow"), (8, 1, "runtime error: .*misaligned")],
)
def test_what_no_op_may_do_ends_the_process(numel, shift, said):
    command = [sys.executable, "-c", PACK.format(numel=numel, shift=shift)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode == 0) == (said == "^$")
    assert re.search(said, done.stderr), done.stderr


def test_the_core_under_test_is_the_sanitized_one():
    core = native.core()
    assert core is not None and core.__file__ is not None
    assert Path(core.__file__) == Path(sanitized_core.PATH or "")
