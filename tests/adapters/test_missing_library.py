"""Without its library an adapter names the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("adapters.accelerate", "accelerate", "adapters"),
        ("adapters.lightning", "lightning", "adapters"),
        ("adapters.transformers", "transformers", "adapters"),
        ("telemetry.tensorboard", "tensorboard", "telemetry"),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(module, library, extra):
    code = f"import sys; sys.modules[{library!r}] = None; import pyengine.{module}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: pyengine.{module} needs {library}, which is not installed: pip install '.[{extra}]' "
        "in a clone of pyengine"
    )
