"""Without its library, a module names the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = {
    "adapters.accelerate": ("accelerate", "adapters"),
    "adapters.lightning": ("lightning", "adapters"),
    "adapters.transformers": ("transformers", "adapters"),
    "telemetry.tensorboard": ("tensorboard", "telemetry"),
}
IMPORT_ALL = f"""
import importlib, sys
for module, (library, _) in {MODULES}.items():
    sys.modules[library] = None
    try:
        importlib.import_module(f"pyengine.{{module}}")
    except ImportError as error:
        print(error)
    else:
        print("imported")
"""


@pytest.fixture(scope="module")
def said():
    """Return the error of importing each module in a process without the libraries."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], check=True, capture_output=True, text=True)
    return dict(zip(MODULES, done.stdout.splitlines(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(said, module):
    library, extra = MODULES[module]
    assert said[module] == (
        f"pyengine.{module} needs {library}, which is not installed: pip install '.[{extra}]' "
        "in a clone of pyengine"
    )
