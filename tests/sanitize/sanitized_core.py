"""Import the core that `PYENGINE_CORE` names as `pyengine.ops._core`; import this module first.

`make sanitize` passes this module to pytest as a plugin, and tests/fuzz imports it. Without the variable, it
changes nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

PATH = os.environ.get("PYENGINE_CORE")


def is_sanitized() -> bool:
    """Return whether AddressSanitizer checks this process."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def coverage() -> ctypes.CDLL:
    """Return the library next to the core that counts which edges of the core have run."""
    assert PATH is not None
    return ctypes.CDLL(str(Path(PATH).parent / "libcoverage.so"))


if PATH is not None and "pyengine.ops._core" not in sys.modules:
    import torch  # noqa: F401 - before the core, which looks up its thread pool

    spec = importlib.util.spec_from_file_location("pyengine.ops._core", PATH)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
