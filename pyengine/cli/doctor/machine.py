"""Checks of the machine: cores and threads, shared memory, files, names, settings."""

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
_SMALL_SHARED_MEMORY = 2**30  # Docker gives 64 MiB, a DataLoader's workers fill that with a few batches
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
    text = f"{found} of torch on {cores} cores" + (f", of which a quota allows {quota:g}" if quota else "")
    if found > max(1, allowed):
        return warn(
            "threads",
            f"{text}: they get in each other's way",
            f"OMP_NUM_THREADS={max(1, int(allowed))}, or torch.set_num_threads; with several ranks, their "
            "share of it",
        )
    return ok("threads", text)


def shared_memory() -> Finding:
    """Look at /dev/shm, through which a DataLoader's workers hand over batches."""
    if not SHARED_MEMORY.exists():
        return ok("shared memory", f"no {SHARED_MEMORY} on this system, which does not need it")
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{SHARED_MEMORY} has {usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
    if usage.free < _SMALL_SHARED_MEMORY:
        return warn(
            "shared memory",
            f"{text}: a DataLoader's workers may die of a bus error",
            "docker run --shm-size=8g (or --ipc=host), or clear out what lies there",
        )
    return ok("shared memory", text)


def files() -> Finding:
    """Look at the limit of open files, and for a temporary folder."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return fail("files", str(error), "make one of them writable, or set TMPDIR")
    free = shutil.disk_usage(folder).free
    text = f"{limit} may be open; {folder} has {free / 2**20:.0f} MiB free"
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        return warn("files", f"{text}: few for tensors between processes", "ulimit -n 65536 before the start")
    if free < _LITTLE_SPACE:
        return warn("files", f"{text}: little for logs and results of workers", "clear it out, or set TMPDIR")
    return ok("files", text)


def host() -> Finding:
    """Look whether this machine's name has an address, which gloo asks for."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return warn(
            "host",
            f"{name} has no address ({error}): gloo takes the loopback, which other machines cannot reach",
            f"put {name} into /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface (ip link lists "
            "them)",
        )
    return ok("host", f"{name} is {address}")


def settings() -> Finding:
    """Tell the environment variables that change what torch and its backends do."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    return ok("settings", ", ".join(f"{name}={value}" for name, value in found.items()) or "none")


def _quota() -> float | None:
    """Return the cores that the container's quota allows; None without one."""
    new, old = CGROUP / "cpu.max", CGROUP / "cpu" / "cpu.cfs_quota_us"
    if new.exists():
        quota, period = new.read_text().split()
    elif old.exists():
        quota, period = old.read_text().strip(), (old.parent / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
