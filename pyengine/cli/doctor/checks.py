"""The checks of `doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from pyengine.comm.launching import launch, num_cores
from pyengine.engine.grad_sync import GradSync
from pyengine.ops import native
from pyengine.ops.plan import BucketPlan

NVIDIA = Path("/dev/nvidiactl")  # exists if the driver is loaded
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is read, nothing is written
_SMALL_SHARED_MEMORY = 2**30  # Docker's default is 64 MiB
_PACKAGES = ("torch_xla", "accelerate", "lightning", "transformers", "rich", "scikit-learn", "numpy")
_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_",
    "MASTER_",
    "MKL_NUM_THREADS",
    "NCCL_",
    "OMP_",
    "PJRT_",
    "TORCH_",
)
# The exceptions raised if a device has no kernel, a result is wrong, or the versions of the core and the
# Python sources differ.
_WRONG = (RuntimeError, ArithmeticError, AttributeError, TypeError)
_REBUILD = "rebuild it in a clone of pyengine: pip install --force-reinstall --no-deps ."
_WORKERS, _ACCUMULATE, _ITEMS = 2, 3, 4
# The exact gradient, Σ_ranks (1 + rank) × Σ_micro-batches (1 + index) × [1, 2, 3] / Σ count = 18/24 ×
# [1, 2, 3].
_GRADIENT = [0.75, 1.5, 2.25]
_TIMEOUT_S = 120
_REMEDY = (
    "for connection errors: unset GLOO_SOCKET_IFNAME, and let the firewall accept connections on the "
    "loopback interface; otherwise solve the problems above first"
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of this machine or installation."""

    name: str  # Name of the check.
    status: Literal["ok", "warn", "fail"]  # "warn": the installation works, but slower or not everywhere.
    text: str
    remedy: str = ""  # how to solve the problem; empty for "ok"


def ok(name: str, text: str) -> CheckResult:
    return CheckResult(name, "ok", text)


def warn(name: str, text: str, remedy: str) -> CheckResult:
    return CheckResult(name, "warn", text, remedy)


def fail(name: str, text: str, remedy: str) -> CheckResult:
    return CheckResult(name, "fail", text, remedy)


def versions() -> CheckResult:
    """Report the versions of Python, torch and related packages."""
    built = torch.version.cuda and f"CUDA {torch.version.cuda}"
    text = (
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"torch {torch.__version__} for {built or torch.version.hip or 'CPU'}"
    )
    for package in _PACKAGES:
        try:
            text += f", {package} {version(package)}"
        except PackageNotFoundError:
            continue
    return ok("versions", text)


def package() -> list[CheckResult]:
    """Report where pyengine is imported from, and whether another installed package has the same name."""
    found = [ok("package", f"imported from {native.FOLDER.parent}")]
    if hidden := native.hidden_installation():
        found = [warn("package", hidden, native.LEAVE)]
    try:
        other = f"pyengine {version('pyengine')}, another project, is installed in the same environment"
    except PackageNotFoundError:
        return found
    remedy = "pip uninstall pyengine pyengine-torch, then pip install . in a clone of pyengine"
    return [*found, warn("package", other, remedy)]


def core() -> CheckResult:
    """Check that the native core loads and computes correctly, and report its instruction set."""
    if native._core is None:
        return _without_core(str(native._missing))
    try:
        _compute(torch.device("cpu"))
    except _WRONG as error:
        return fail("core", f"loads, then fails: {error}", _REBUILD)
    pool = native._core.thread_pool()
    cuda = "with" if native._core.has_cuda else "without"
    text = f"loads; {native._core.isa()} instructions, {cuda} CUDA kernels, threads of {pool}"
    if pool != "torch" and torch.__version__ >= (2, 10):  # type: ignore[operator]  # takes tuples
        return warn("core", f"{text}: torch's thread pool was not found", _REBUILD)
    return ok("core", text)


def _without_core(error: str) -> CheckResult:
    files = sorted(path.name for path in native.FOLDER.glob("_core*") if path.suffix in (".so", ".pyd"))
    mine = [name for name in files if name.removeprefix("_core") in EXTENSION_SUFFIXES]
    if mine:
        return fail("core", f"{mine[0]} does not load: {error}", _REBUILD)
    others = f"; {', '.join(files)} is for another Python" if files else ""
    if native.hidden_installation():
        return warn("core", "not built in the source tree", native.LEAVE)
    return warn(
        "core",
        f"not built{others}: plain PyTorch computes the same results, but more slowly",
        "pip install . in a clone of pyengine, with a C++20 compiler and PYENGINE_NO_EXT unset; then run "
        "Python in a folder other than the clone, whose sources it would otherwise import",
    )


def cuda() -> list[CheckResult]:
    """Check the CUDA devices by running a kernel on each."""
    if not torch.cuda.is_available():
        return [_without_cuda()]
    return [_device(index) for index in range(torch.cuda.device_count())]


def _without_cuda() -> CheckResult:
    driver = NVIDIA.exists()
    if torch.version.cuda is None and driver:
        return warn(
            "cuda",
            f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )
    if driver:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        return fail(
            "cuda",
            f"there is an NVIDIA driver, but torch sees no device{hidden}",
            f"unset CUDA_VISIBLE_DEVICES, or update the driver to one for CUDA {torch.version.cuda} "
            "(see nvidia-smi)",
        )
    return ok("cuda", "no CUDA device here")


def _device(index: int) -> CheckResult:
    name = f"cuda:{index}"
    about = torch.cuda.get_device_properties(index)
    arch = f"{about.major}{about.minor}"
    text = f"{about.name}, sm_{arch}, {about.total_memory / 2**30:.0f} GiB"
    try:
        _compute(torch.device("cuda", index))
    except _WRONG as error:
        return fail(
            name,
            f"{text}: {error}",
            f"torch is built for {' '.join(torch.cuda.get_arch_list())}, which must include sm_{arch}; build "
            f"the core for it: PYENGINE_CUDA=1 PYENGINE_CUDA_ARCHS={arch} pip install --force-reinstall "
            "--no-deps .",
        )
    if native._core is None or not native._core.has_cuda:
        nvcc = shutil.which("nvcc") or "nvcc 12.8 or newer, which is not on PATH"
        return warn(
            name,
            f"{text}: works, but more slowly, without CUDA kernels",
            f"PYENGINE_CUDA=1 pip install --force-reinstall --no-deps . (with {nvcc})",
        )
    return ok(name, f"{text}: kernels run")


def _compute(device: torch.device) -> None:
    """Run an op with a known result; raise ArithmeticError if the result differs."""
    sizes = [3, 1000]
    plan = BucketPlan([0, 32], sizes)
    tensors = [torch.full((size,), float(size), device=device) for size in sizes]
    sumsq = torch.zeros(2, dtype=torch.float64, device=device)
    flags = torch.zeros(2, dtype=torch.uint8, device=device)
    plan.unscale_norm(tensors, tensors, torch.tensor(0.5, device=device), sumsq=sumsq, nonfinite=flags)
    got = [sumsq.tolist(), [tensor.unique().tolist() for tensor in tensors], flags.tolist()]
    want = [[size * (size / 2) ** 2 for size in sizes], [[size / 2] for size in sizes], [0, 0]]
    if got != want:
        raise ArithmeticError(f"unscale_norm returned {got}, expected {want}")


def threads() -> CheckResult:
    """Compare the number of torch's threads with the number of cores that this process may use."""
    cores, quota = num_cores(), None
    if CPU_QUOTA.exists() and not CPU_QUOTA.read_text().startswith("max"):
        limit, period = CPU_QUOTA.read_text().split()
        quota = int(limit) / int(period)
    allowed = min(cores, quota) if quota else cores
    found = torch.get_num_threads()
    text = f"{found} torch threads on {cores} cores" + (f", with a quota of {quota:g}" if quota else "")
    if found > max(1, allowed):
        return warn(
            "threads",
            f"{text}: more threads than cores slow each other down",
            f"set OMP_NUM_THREADS={max(1, int(allowed))}, or call torch.set_num_threads; with "
            "several ranks, divide this number among them",
        )
    return ok("threads", text)


def shared_memory() -> CheckResult:
    """Check /dev/shm, the shared memory of a host's ranks and of DataLoader workers."""
    if not SHARED_MEMORY.exists():
        return ok("shared memory", f"no {SHARED_MEMORY} on this system, which does not need it")
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{SHARED_MEMORY} has {usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
    if usage.free < _SMALL_SHARED_MEMORY:
        return warn(
            "shared memory",
            f"{text}: processes that share tensors may end with a bus error",
            "docker run --shm-size=8g (or --ipc=host), or delete files there",
        )
    return ok("shared memory", text)


def host() -> CheckResult:
    """Check that the host name resolves to an address, which gloo needs."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return warn(
            "host",
            f"{name} has no address ({error}): gloo uses loopback, which works only within this host",
            f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface (see ip link)",
        )
    return ok("host", f"{name} is {address}")


def settings() -> CheckResult:
    """Report the environment variables that change torch or its backends."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    return ok("settings", ", ".join(f"{name}={value}" for name, value in found.items()) or "none")


def window_gradient() -> list[float]:
    """Return this rank's gradient of a window; every micro-batch adds an integer multiple of [1, 2, 3]."""
    weight = torch.nn.Parameter(torch.zeros(3))
    sync = GradSync([weight], accumulate=_ACCUMULATE)
    for window in sync.windows(range(_ACCUMULATE)):
        for index in window:
            factor = (1 + dist.get_rank()) * (1 + index)
            sync.backward(factor * (weight * torch.arange(1.0, 4.0)).sum(), count=_ITEMS)
        sync.unscale_()
    assert weight.grad is not None  # every micro-batch uses the weight
    return [float(value) for value in weight.grad]


def workers() -> CheckResult:
    """Run a window of `GradSync` on two gloo workers, and compare the gradient with its exact value."""
    try:
        found = launch(window_gradient, workers=_WORKERS, timeout_s=_TIMEOUT_S)
    except TimeoutError:
        return fail("workers", f"two gloo workers have not ended after {_TIMEOUT_S} s", _REMEDY)
    except (RuntimeError, OSError) as error:
        return fail("workers", str(error).strip(), _REMEDY)
    if found != [_GRADIENT] * _WORKERS:
        return fail(
            "workers",
            f"two gloo workers have the gradients {found}, expected {_GRADIENT}",
            "report this output as a bug: gradients must never be wrong",
        )
    return ok("workers", "two gloo workers start, and the gradient of a GradSync window is exact on both")


CHECKS: dict[str, Callable[[], CheckResult | list[CheckResult]]] = {
    "versions": versions,
    "package": package,
    "core": core,
    "cuda": cuda,
    "threads": threads,
    "shared memory": shared_memory,
    "host": host,
    "settings": settings,
    "workers": workers,
}
