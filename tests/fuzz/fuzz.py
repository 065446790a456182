"""Search with libFuzzer for inputs that make a target fail; `make fuzz` runs this through fuzz.sh.

    FUZZ_TARGET=state_boundary tests/fuzz/fuzz.sh [libFuzzer's options] CORPUS ...

An input is new if it reaches a new edge of pyengine's Python code (Atheris) or of the sanitized core
(tests/sanitize/coverage.cpp).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sanitize")]

import atheris  # type: ignore[import-not-found]
import sanitized_core
import torch  # noqa: F401 - not to be instrumented


def _hand_over_counters() -> None:
    """Register the core's coverage counters with libFuzzer, and forward those of Python code to it."""
    from atheris import core_with_libfuzzer

    fuzzer, core = ctypes.CDLL(core_with_libfuzzer.__file__), sanitized_core.coverage()
    for name, taker, kind in (
        ("counters", "8bit_counters", ctypes.c_uint8),
        ("places", "pcs", ctypes.c_size_t),
    ):
        take = getattr(fuzzer, f"__sanitizer_cov_{taker}_init")
        ctypes.c_void_p.in_dll(core, f"coverage_take_{name}").value = ctypes.cast(take, ctypes.c_void_p).value
        table = (kind * (2**16 if name == "counters" else 2**17)).in_dll(core, f"coverage_{name}")
        begin = ctypes.addressof(table)
        take(ctypes.c_void_p(begin), ctypes.c_void_p(begin + ctypes.sizeof(table)))


_hand_over_counters()
with atheris.instrument_imports(include=["pyengine"]):
    target = importlib.import_module(os.environ["FUZZ_TARGET"])

if __name__ == "__main__":
    # libFuzzer restarts itself by this name when it merges corpora.
    atheris.Setup([str(HERE / "fuzz.sh"), *sys.argv[1:]], target.run)
    atheris.Fuzz()
