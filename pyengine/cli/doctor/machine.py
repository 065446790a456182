"""Checks of the machine: threads, shared memory, files, host name, environment variables."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path

import torch

from pyengine.cli import machine
from pyengine.cli.doctor.finding import Finding, fail, ok, warn

CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is read, nothing is written
_SMALL_SHARED_MEMORY = 2**30  # Docker's 64 MiB hold a few batches of a DataLoader
_FEW_FILES = 1024
_LITTLE_SPACE = 100 * 2**20
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


def threads() -> Finding:
    """Compare torch's threads with the cores that this process may use."""
    cores, quota = machine.num_cores(), _quota()
    allowed = min(cores, quota) if quota else cores
    found = torch.get_num_threads()
    text = f"{found} torch threads on {cores} cores" + (f", with a quota of {quota:g}" if quota else "")
    if found > max(1, allowed):
        return warn(
            "threads",
            f"{text}: more threads than cores slow each other down",
            f"OMP_NUM_THREADS={max(1, int(allowed))}, or torch.set_num_threads; with several "
            "ranks divided by their number",
        )
    return ok("threads", text)


def shared_memory() -> Finding:
    """Check /dev/shm, through which a DataLoader's workers pass batches."""
    if not SHARED_MEMORY.exists():
        return ok("shared memory", f"no {SHARED_MEMORY} on this system, which does not need it")
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{SHARED_MEMORY} has {usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
    if usage.free < _SMALL_SHARED_MEMORY:
        return warn(
            "shared memory",
            f"{text}: a DataLoader's workers may end with a bus error",
            "docker run --shm-size=8g (or --ipc=host), or delete files there",
        )
    return ok("shared memory", text)


def files() -> Finding:
    """Check the limit of open files, and the temporary folder."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return fail("files", str(error), "make one of them writable, or set TMPDIR")
    free = shutil.disk_usage(folder).free
    text = f"{limit} may be open; {folder} has {free / 2**20:.0f} MiB free"
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        return warn(
            "files", f"{text}: few for tensors that processes share", "run ulimit -n 65536 before the start"
        )
    if free < _LITTLE_SPACE:
        return warn(
            "files", f"{text}: little for logs and results of workers", "delete files there, or set TMPDIR"
        )
    return ok("files", text)


def host() -> Finding:
    """Check that the host name resolves to an address, which gloo needs."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return warn(
            "host",
            f"{name} has no address ({error}): gloo uses the loopback interface, which is local",
            f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface (see ip link)",
        )
    return ok("host", f"{name} is {address}")


def settings() -> Finding:
    """Report the environment variables that change torch or its backends."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    return ok("settings", ", ".join(f"{name}={value}" for name, value in found.items()) or "none")


def _quota() -> float | None:
    """Return the cores of the container's quota; None without a quota."""
    new, old = CGROUP / "cpu.max", CGROUP / "cpu" / "cpu.cfs_quota_us"
    if new.exists():
        quota, period = new.read_text().split()
    elif old.exists():
        quota, period = old.read_text().strip(), (old.parent / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
