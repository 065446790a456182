"""PYENGINE_ISA=generic, avx2 or avx512: the whole suite on one instruction set, also in the processes that
tests start.

Read here and nowhere else. The core is told as it is imported, by whatever process does so, however it was
started.
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
    """Return the instruction sets of this build and machine, and leave the one in force."""
    before = core.isa()
    names = [name for name in LEVELS if core.set_isa(name)]
    core.set_isa(before)
    return names


def wanted() -> str | None:
    """Return what PYENGINE_ISA names; None leaves the choice to the core."""
    return os.environ.get("PYENGINE_ISA") or None


def everywhere() -> str | None:
    """Force what is wanted in this process and in those that it starts; say why that cannot be."""
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
    """Let the core of this process, which has just started, begin with what is wanted."""
    if wanted() is not None:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the core where it is, and lets its import end with the choice of the instruction set."""

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
                )  # it was there when the tests began

            spec.loader.exec_module = execute_and_force  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":  # for `make test-isa`
    from pyengine.ops import _core as _here

    print(*(name for name in available(_here) if name != _here.isa()))
