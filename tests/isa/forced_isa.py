"""PYENGINE_ISA=generic, avx2 or avx512 runs all tests, and their child processes, on one instruction set.

Only this module reads the variable. Every process forces the instruction set when it imports the core,
however the process was started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

LEVELS = ("generic", "avx2", "avx512")
_CORE = "pyengine.ops._core"


def available(core: ModuleType) -> list[str]:
    """Return the instruction sets of this build and machine; keep the current one."""
    before = core.isa()
    names = [name for name in LEVELS if core.set_isa(name)]
    core.set_isa(before)
    return names


def wanted() -> str | None:
    """Return the instruction set that PYENGINE_ISA names; None leaves the choice to the core."""
    return os.environ.get("PYENGINE_ISA") or None


def everywhere() -> str | None:
    """Force the wanted instruction set here and in child processes; return the problem if there is one."""
    level = wanted()
    if level is None:
        return None
    try:
        from pyengine.ops import _core
    except ImportError as error:
        return f"PYENGINE_ISA={level}: needed a native core, and there is none ({error}); unset PYENGINE_ISA"
    if level not in available(_core):
        return (
            f"PYENGINE_ISA={level}: needed one of {', '.join(available(_core))}, which this build and "
            "machine have"
        )
    _core.set_isa(level)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return None


def in_this_process() -> None:
    """Force the wanted instruction set when this new process imports the core."""
    if wanted() is not None:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the core as usual, and forces the instruction set at the end of its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        del path, target
        if name != _CORE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_force(module: ModuleType) -> None:
                execute(module)
                assert module.set_isa(wanted()), (
                    f"PYENGINE_ISA={wanted()}"
                )  # it was available when the tests began

            spec.loader.exec_module = execute_and_force  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":  # for `make test-isa`
    from pyengine.ops import _core as _here

    print(*(name for name in available(_here) if name != _here.isa()))
