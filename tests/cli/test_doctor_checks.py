"""Each check of `doctor`, on what is broken and on what is not."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from pyengine.cli.doctor import machine as doctor_machine
from pyengine.cli.doctor import native as doctor_native
from pyengine.cli.doctor import pytorch as doctor_torch
from pyengine.cli.doctor import workers as doctor_workers
from pyengine.cli.doctor.finding import Finding
from pyengine.ops import native
from pyengine.ops.plan import BucketPlan

Patch = pytest.MonkeyPatch


def assert_says(finding: Finding, status: str, text: str, remedy: str = "") -> None:
    assert finding.status == status, finding
    assert text in finding.text and remedy in finding.remedy, finding
    assert bool(finding.remedy) == (status != "ok"), finding


# --- The compiler ---


def a_compiler(folder: Path, *, exit_code: int) -> str:
    path = folder / "my-c++"
    path.write_text(f"#!/bin/sh\ncat > /dev/null\necho 'error: what is c++20' >&2\nexit {exit_code}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler_on_path(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_says(doctor_native.compiler(), "warn", "none of c++, g++, clang++ on PATH", "apt install g++")


def test_cxx_that_is_not_there(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CXX", "/no/such/c++")
    assert_says(doctor_native.compiler(), "warn", "CXX=/no/such/c++ is not there", "set CXX")


@pytest.mark.parametrize(
    ("exit_code", "status", "text"), [(1, "warn", "c++20 (error: what"), (0, "ok", "takes")]
)
def test_a_compiler_is_asked_for_c_20(
    monkeypatch: Patch, tmp_path: Path, exit_code: int, status: str, text: str
) -> None:
    monkeypatch.setenv("CXX", a_compiler(tmp_path, exit_code=exit_code))
    finding = doctor_native.compiler()
    assert finding.status == status and text.lower() in finding.text.lower(), finding


# --- The native core ---


def without_core(monkeypatch: Patch, folder: Path, *files: str) -> Finding:
    monkeypatch.setattr(native, "_core", None)
    monkeypatch.setattr(native, "_missing", ImportError("undefined symbol: oops"))
    monkeypatch.setattr(doctor_native, "FOLDER", folder)
    for name in files:
        (folder / name).write_text("")
    return doctor_native.core()


def test_a_core_that_was_not_built(monkeypatch: Patch, tmp_path: Path) -> None:
    finding = without_core(monkeypatch, tmp_path)
    assert_says(finding, "warn", "not built: results are the same", "pip install .")


def test_a_core_for_another_python(monkeypatch: Patch, tmp_path: Path) -> None:
    finding = without_core(monkeypatch, tmp_path, "_core.cpython-39-x86_64-linux-gnu.so")
    assert_says(
        finding, "warn", "_core.cpython-39-x86_64-linux-gnu.so is for another Python", "pip install ."
    )


def test_a_core_that_does_not_load(monkeypatch: Patch, tmp_path: Path) -> None:
    finding = without_core(monkeypatch, tmp_path, f"_core{EXTENSION_SUFFIXES[0]}")
    assert_says(finding, "fail", "does not load: undefined symbol: oops", "--force-reinstall")


@pytest.fixture
def fake_core(monkeypatch: Patch) -> SimpleNamespace:
    core = SimpleNamespace(isa=lambda: "avx2", thread_pool=lambda: "torch", has_cuda=False)
    core.BucketPlan = lambda offsets, numels: None
    monkeypatch.setattr(native, "_core", core)
    monkeypatch.setattr(native, "core", lambda: core)  # the real one remembers what it has found
    return core


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda *_, **__: None, "unscale_norm gives [[0.0, 0.0], [[3.0], [1000.0]], [0, 0]]"),
        (lambda self, *_, **__: self._native.no_such_op, "object has no attribute"),
    ],
    ids=["wrong result", "older core"],
)
def test_a_core_that_computes_wrong_or_is_too_old(
    monkeypatch: Patch, fake_core: SimpleNamespace, run, text: str
) -> None:
    monkeypatch.setattr(BucketPlan, "unscale_norm", run)
    assert_says(doctor_native.core(), "fail", text, "--force-reinstall")


@pytest.mark.parametrize(("pool", "status"), [("torch", "ok"), ("std::thread", "warn")])
def test_instructions_and_thread_pool_are_named(
    monkeypatch: Patch, fake_core: SimpleNamespace, pool: str, status: str
) -> None:
    fake_core.thread_pool = lambda: pool
    monkeypatch.setattr(doctor_native, "_compute", lambda device: None)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    finding = doctor_native.core()
    assert finding.status == status
    assert f"avx2 instructions, without CUDA kernels, threads of {pool}" in finding.text


# --- CUDA ---


def without_cuda(monkeypatch: Patch, driver: Path, built: str | None) -> Finding:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(doctor_native, "NVIDIA", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    (finding,) = doctor_native.cuda()
    return finding


@pytest.mark.parametrize("built", [None, "13.0"])
def test_no_device_is_fine_where_there_is_no_driver(
    monkeypatch: Patch, tmp_path: Path, built: str | None
) -> None:
    assert_says(without_cuda(monkeypatch, tmp_path / "none", built), "ok", "no CUDA device")


def test_a_torch_without_cuda_beside_a_driver(monkeypatch: Patch, tmp_path: Path) -> None:
    assert_says(
        without_cuda(monkeypatch, tmp_path, None), "warn", "is built without CUDA", "CUDA build of torch"
    )


def test_a_driver_whose_devices_torch_does_not_see(monkeypatch: Patch, tmp_path: Path) -> None:
    finding = without_cuda(monkeypatch, tmp_path, "13.0")
    assert_says(finding, "fail", "no device (CUDA_VISIBLE_DEVICES=7)", "driver to one for CUDA 13.0")


@pytest.fixture
def device(monkeypatch: Patch, fake_core: SimpleNamespace) -> SimpleNamespace:
    """Pretend that there is one old CUDA device."""
    about = SimpleNamespace(name="T4", major=7, minor=5, total_memory=16 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(doctor_native, "_compute", lambda device: None)
    return fake_core


def test_a_device_that_the_kernels_were_not_built_for(monkeypatch: Patch, device: SimpleNamespace) -> None:
    def no_kernel(device: torch.device) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(doctor_native, "_compute", no_kernel)
    (finding,) = doctor_native.cuda()
    assert_says(finding, "fail", "T4, sm_75, 16 GiB: no kernel image", "PYENGINE_CUDA_ARCHS=75")
    assert "torch is built for sm_80 sm_90" in finding.remedy


@pytest.mark.parametrize(("has_cuda", "status"), [(True, "ok"), (False, "warn")])
def test_a_device_with_and_without_cuda_kernels(device: SimpleNamespace, has_cuda: bool, status: str) -> None:
    device.has_cuda = has_cuda
    (finding,) = doctor_native.cuda()
    assert_says(finding, status, "T4, sm_75, 16 GiB", "" if has_cuda else "PYENGINE_CUDA=1")


# --- Python, torch, packages ---


def test_an_old_python(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert_says(doctor_torch.python(), "fail", "", "3.10 or newer")


@pytest.mark.parametrize(("number", "status"), [("2.8.1", "fail"), ("2.9.0", "ok"), ("2.13.0+cpu", "ok")])
def test_torch_is_at_least_2_9(monkeypatch: Patch, number: str, status: str) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(number))
    assert_says(doctor_torch.torch_itself(), status, number, "" if status == "ok" else "torch>=2.9")


def test_a_torch_without_distributed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert_says(doctor_torch.backends(), "fail", "without distributed", "install torch")


def test_a_torch_without_gloo(monkeypatch: Patch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert_says(doctor_torch.backends(), "fail", "no gloo", "install torch")


def test_cuda_without_nccl(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert_says(doctor_torch.backends(), "warn", "no nccl", "NCCL")


@pytest.mark.parametrize(
    ("theirs", "status", "text", "remedy"),
    [
        (None, "ok", "not installed", ""),
        ("2.9.0", "ok", "2.9.0", ""),
        ("2.8.1", "warn", "2.8.1 is for torch 2.8 and cannot be imported with 2.9.1", "torch_xla==2.9.*"),
    ],
)
def test_torch_xla_fits_torch(
    monkeypatch: Patch, theirs: str | None, status: str, text: str, remedy: str
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    monkeypatch.setattr(doctor_torch, "_version", lambda package: theirs)
    assert_says(doctor_torch.xla(), status, text, remedy)


@pytest.mark.parametrize(
    ("missing", "status", "text"),
    [("rich", "warn", "other commands need rich too"), ("lightning", "ok", "not needed: lightning")],
)
def test_missing_packages_are_told_apart(monkeypatch: Patch, missing: str, status: str, text: str) -> None:
    monkeypatch.setattr(doctor_torch, "_version", lambda package: None if package == missing else "1.2")
    assert_says(doctor_torch.packages(), status, text, "" if status == "ok" else "pip install '.[train]'")


# --- The machine ---


def a_quota(folder: Path, version: int, quota: str) -> None:
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
        return
    (folder / "cpu").mkdir()
    (folder / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu" / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize(
    ("version", "quota", "status", "text"),
    [
        (2, "max", "ok", "4 of torch on 4 cores"),
        (1, "-1", "ok", "4 of torch on 4 cores"),
        (2, "400000", "ok", "a quota allows 4"),
        (2, "250000", "warn", "a quota allows 2.5"),
        (1, "50000", "warn", "a quota allows 0.5"),
    ],
)
def test_threads_are_held_against_the_containers_quota(
    monkeypatch: Patch, tmp_path: Path, version: int, quota: str, status: str, text: str
) -> None:
    a_quota(tmp_path, version, quota)
    monkeypatch.setattr(doctor_machine, "CGROUP", tmp_path)
    monkeypatch.setattr(doctor_machine.os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    remedy = {"250000": "OMP_NUM_THREADS=2", "50000": "OMP_NUM_THREADS=1"}.get(quota, "")
    assert_says(doctor_machine.threads(), status, text, remedy)


def test_threads_are_held_against_the_cores_of_this_process(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_machine, "CGROUP", tmp_path)
    monkeypatch.setattr(doctor_machine.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert_says(doctor_machine.threads(), "warn", "4 of torch on 1 cores", "OMP_NUM_THREADS=1")


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, "warn"), (2**33, "ok")])
def test_little_shared_memory(monkeypatch: Patch, tmp_path: Path, free: int, status: str) -> None:
    monkeypatch.setattr(doctor_machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=free, free=free))
    remedy = "" if status == "ok" else "--shm-size"
    assert_says(doctor_machine.shared_memory(), status, f"{free // 2**20} MiB free", remedy)


def test_a_system_without_shared_memory_files(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_machine, "SHARED_MEMORY", tmp_path / "none")
    assert_says(doctor_machine.shared_memory(), "ok", "does not need it")


@pytest.mark.parametrize(("limit", "status"), [(256, "warn"), (1024, "ok"), (-1, "ok")])
def test_few_open_files(monkeypatch: Patch, limit: int, status: str) -> None:
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda which: (limit, limit))
    assert_says(doctor_machine.files(), status, "may be open", "" if status == "ok" else "ulimit -n")


def test_no_temporary_folder(monkeypatch: Patch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert_says(doctor_machine.files(), "fail", "No usable temporary directory", "TMPDIR")


def test_a_full_temporary_folder(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert_says(doctor_machine.files(), "warn", "1 MiB free", "TMPDIR")


def test_a_host_name_without_an_address(monkeypatch: Patch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert_says(doctor_machine.host(), "warn", "has no address (Name or service not known)", "/etc/hosts")


def test_settings_of_torch_and_its_backends_are_told(monkeypatch: Patch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET", "mine")
    finding = doctor_machine.settings()
    assert "OMP_NUM_THREADS=3" in finding.text and "mine" not in finding.text


# --- Two workers ---


def a_wrong_gradient() -> list[float]:
    return [1.0, 2.0, 3.0]


def no_gradient() -> list[float]:
    raise OSError("the network is down")


@pytest.fixture
def here(monkeypatch: Patch) -> None:
    """Workers that cost nothing: this process, again and again."""
    monkeypatch.setattr(doctor_workers, "launch", lambda window, workers, timeout_s: [window()] * workers)


def never_ends() -> list[float]:
    time.sleep(1000)
    return []


def test_workers_with_the_right_gradient() -> None:
    assert doctor_workers.closed_form() == [0.75, 1.5, 2.25]
    assert_says(doctor_workers.workers(), "ok", "exact on both")


@pytest.mark.usefixtures("here")
def test_workers_with_a_wrong_gradient() -> None:
    finding = doctor_workers.workers(a_wrong_gradient)
    assert_says(finding, "fail", "[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], [0.75, 1.5, 2.25] is right", "report")


@pytest.mark.usefixtures("here")
def test_workers_that_fail() -> None:
    finding = doctor_workers.workers(no_gradient)
    assert_says(finding, "fail", "the network is down", "GLOO_SOCKET_IFNAME")


def test_workers_that_never_end_are_ended() -> None:
    finding = doctor_workers.workers(never_ends, patience_s=0.5)
    assert_says(finding, "fail", "have not ended after 0.5 s", "GLOO_SOCKET_IFNAME")
