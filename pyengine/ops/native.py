"""Import of the native core, pyengine.ops._core, if it was built."""

import functools
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch  # imported before _core, which looks up torch's thread pool by name

from pyengine.ops.device import HOST

__all__ = ["FOLDER", "LEAVE", "_core", "can_gather", "core", "cuda_core", "hidden_installation"]

FOLDER = Path(__file__).parent
_BUILD = (
    "Unset PYENGINE_NO_EXT, build the core with `pip install .` (needs a C++20 compiler), and run Python "
    "outside of the clone; inside, Python would import the clone's sources."
)
LEAVE = "Leave that folder (cd ..), or remove it from PYTHONPATH"

try:
    from pyengine.ops import _core

    _missing: ImportError | None = None
except ImportError as error:
    _core, _missing = None, error  # type: ignore[assignment]


def hidden_installation() -> str:
    """Describe the imported source tree if it hides an installed pyengine; otherwise return ""."""
    here = FOLDER.resolve()
    tree = here.parents[1]
    if not (tree / "setup.py").is_file():  # pyengine is imported from an installation
        return ""
    for entry in sys.path:
        other = Path(entry, "pyengine", "ops").resolve()  # "" is the current folder
        if other != here and (other / "native.py").is_file():
            return f"this is the source tree {tree}, which hides the pyengine installed in {other.parents[1]}"
    return ""


@functools.cache
def core() -> ModuleType | None:
    """Return the native module, or None after a single warning; call this at the first use of an op."""
    if _core is None:
        hidden = hidden_installation()
        warnings.warn(
            f"pyengine runs without its native core ({hidden or _missing}): results are the same, but "
            f"ops are slower. {LEAVE + '.' if hidden else _BUILD}",
            RuntimeWarning,
            stacklevel=3,
        )
    return _core


@functools.cache
def cuda_core() -> ModuleType | None:
    """Return the native module if it has CUDA kernels, or None after a single warning."""
    found = core()
    if found is None or found.has_cuda:
        return found
    warnings.warn(
        "pyengine's native core was built without CUDA, so ops on CUDA tensors run in plain PyTorch: results "
        "are the same except for the rounding of norms, but ops are slower. Build it with `PYENGINE_CUDA=1 "
        "pip install .` (needs nvcc).",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


# Tensor subclasses may store their elements elsewhere, so the core reads only these types.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# Dispatch keys of tensors that store their elements unchanged at their address. Python checks tensors with
# other keys (lazy negation, subclasses with custom dispatch, fake tensors).
_PLAIN_KEYS = ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")


@functools.cache
def can_gather() -> bool:
    """Return whether the core can read tensor objects directly, without attribute access in Python."""
    if _core is None:
        return False
    plain = 0
    for name in _PLAIN_KEYS:
        plain |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    # Use distinct numbers, so that the core can locate each number in the memory of these objects.
    probe = torch.empty(1237, dtype=torch.uint8, device=HOST)[1013:]
    storage, keys = probe.untyped_storage(), torch._C._dispatch_keys(probe).raw_repr()
    return _core.learn_tensor_object(
        probe, probe._cdata, storage._cdata, keys, 1013, storage.data_ptr(), 1237, plain, _PLAIN_TYPES
    )
