"""Let this process import the core that `PYENGINE_CORE` names, as `pyengine.ops._core`: import this first.

`make sanitize` gives it to pytest as a plugin, and tests/fuzz has it; without the variable nothing changes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

PATH = os.environ.get("PYENGINE_CORE")


def is_sanitized() -> bool:
    """Whether AddressSanitizer watches this process."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def coverage() -> ctypes.CDLL:
    """Return the library beside the core that counts which of its edges were run."""
    assert PATH is not None
    return ctypes.CDLL(str(Path(PATH).parent / "libcoverage.so"))


if PATH is not None and "pyengine.ops._core" not in sys.modules:
    import torch  # noqa: F401 - before the core, which looks its thread pool up

    spec = importlib.util.spec_from_file_location("pyengine.ops._core", PATH)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
