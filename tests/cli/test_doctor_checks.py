"""Each check of `doctor`, with and without the problem that it looks for."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

from pyengine.cli.doctor import checks
from pyengine.cli.doctor.checks import CheckResult
from pyengine.ops import native
from pyengine.ops.plan import BucketPlan


def assert_says(finding: CheckResult, status: str, text: str, remedy: str = "") -> None:
    assert finding.status == status, finding
    assert text in finding.text and remedy in finding.remedy, finding
    assert bool(finding.remedy) == (status != "ok"), finding


# --- The native core ---


@pytest.mark.parametrize(
    ("file", "status", "text", "remedy"),
    [
        ("", "warn", "not built: plain PyTorch computes the same results", "pip install ."),
        ("_core.cpython-39-x86_64-linux-gnu.so", "warn", "linux-gnu.so is for another Python", "pip install"),
        (f"_core{EXTENSION_SUFFIXES[0]}", "fail", "does not load: undefined symbol", "--force-reinstall"),
    ],
)
def test_a_core_that_is_missing_or_broken(monkeypatch, tmp_path, file, status, text, remedy):
    monkeypatch.setattr(native, "_core", None)
    monkeypatch.setattr(native, "_missing", ImportError("undefined symbol: oops"))
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native.sys, "path", [])
    if file:
        (tmp_path / file).write_text("")
    assert_says(checks.core(), status, text, remedy)


@pytest.fixture
def clone(monkeypatch, tmp_path):
    """Return a source tree without a native core, and the list that replaces `sys.path`."""
    ops = tmp_path / "clone" / "pyengine" / "ops"
    ops.mkdir(parents=True)
    (tmp_path / "clone" / "setup.py").touch()
    path = [str(tmp_path / "clone"), str(tmp_path / "installed")]
    monkeypatch.setattr(native.sys, "path", path)
    monkeypatch.setattr(native, "_core", None)
    monkeypatch.setattr(native, "FOLDER", ops)
    monkeypatch.setattr(checks, "version", lambda name: importlib.metadata.version(f"no-{name}"))
    return SimpleNamespace(folder=tmp_path / "clone", path=path)


@pytest.fixture
def installed(tmp_path):
    """An installed pyengine."""
    ops = tmp_path / "installed" / "pyengine" / "ops"
    ops.mkdir(parents=True)
    (ops / "native.py").touch()
    return tmp_path / "installed"


@pytest.mark.parametrize("entry", ["installed", ""])
def test_a_source_tree_that_hides_an_installed_pyengine(monkeypatch, tmp_path, clone, installed, entry):
    monkeypatch.chdir(installed)
    clone.path[1] = entry and str(installed)
    hides = f"this is the source tree {clone.folder}, which hides the pyengine installed in {installed}"
    remedy = "Leave that folder (cd ..), or remove it from PYTHONPATH"
    (package,) = checks.package()
    assert_says(package, "warn", hides, remedy)
    assert_says(checks.core(), "warn", "not built in the source tree", remedy)
    native.core.cache_clear()
    with pytest.warns(RuntimeWarning, match=re.escape(f"({hides}): results are the same")) as caught:
        native.core()
    assert remedy in str(caught[0].message)
    native.core.cache_clear()


def test_a_source_tree_alone_and_an_installation_before_a_source_tree_hide_nothing(clone, installed):
    (installed / "pyengine" / "ops" / "native.py").unlink()  # like the other project with this name
    assert_says(*checks.package(), "ok", f"imported from {clone.folder}/pyengine")
    assert_says(checks.core(), "warn", "plain PyTorch computes", "in a folder other than the clone")
    (installed / "pyengine" / "ops" / "native.py").touch()
    (clone.folder / "setup.py").unlink()
    assert_says(*checks.package(), "ok", f"imported from {clone.folder}/pyengine")


def test_the_other_project_named_pyengine(monkeypatch, clone):
    monkeypatch.setattr(checks, "version", {"pyengine": "0.0.4"}.__getitem__)
    _, other = checks.package()
    assert_says(other, "warn", "pyengine 0.0.4, another project", "pip uninstall pyengine pyengine-torch")


@pytest.fixture
def fake_core(monkeypatch):
    core = SimpleNamespace(isa=lambda: "avx2", thread_pool=lambda: "torch", has_cuda=False)
    core.BucketPlan = lambda offsets, numels: None
    monkeypatch.setattr(native, "_core", core)
    monkeypatch.setattr(native, "core", lambda: core)  # the real function caches its result
    return core


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda *_, **__: None, "unscale_norm returned [[0.0, 0.0], [[3.0], [1000.0]], [0, 0]]"),
        (lambda self, *_, **__: self._native.no_such_op, "object has no attribute"),
    ],
    ids=["wrong result", "older core"],
)
def test_a_core_that_computes_wrong_or_is_too_old(monkeypatch, fake_core, run, text):
    monkeypatch.setattr(BucketPlan, "unscale_norm", run)
    assert_says(checks.core(), "fail", text, "--force-reinstall")


@pytest.mark.parametrize(("pool", "status"), [("torch", "ok"), ("std::thread", "warn")])
def test_instructions_and_thread_pool_are_named(monkeypatch, fake_core, pool, status):
    fake_core.thread_pool = lambda: pool
    monkeypatch.setattr(checks, "_compute", lambda device: None)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    finding = checks.core()
    assert finding.status == status
    assert f"avx2 instructions, without CUDA kernels, threads of {pool}" in finding.text


# --- CUDA ---


@pytest.mark.parametrize(
    ("driver", "built", "status", "text", "remedy"),
    [
        (False, None, "ok", "no CUDA device", ""),
        (False, "13.0", "ok", "no CUDA device", ""),
        (True, None, "warn", "is built without CUDA", "CUDA build of torch"),
        (True, "13.0", "fail", "no device (CUDA_VISIBLE_DEVICES=7)", "driver to one for CUDA 13.0"),
    ],
)
def test_no_device_is_fine_without_a_driver(monkeypatch, tmp_path, driver, built, status, text, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(checks, "NVIDIA", tmp_path if driver else tmp_path / "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    (finding,) = checks.cuda()
    assert_says(finding, status, text, remedy)


@pytest.fixture
def device(monkeypatch, fake_core):
    """Pretend that there is one old CUDA device."""
    about = SimpleNamespace(name="T4", major=7, minor=5, total_memory=16 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(checks, "_compute", lambda device: None)
    return fake_core


def test_a_device_that_the_kernels_were_not_built_for(monkeypatch, device):
    def no_kernel(device):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(checks, "_compute", no_kernel)
    (finding,) = checks.cuda()
    assert_says(finding, "fail", "T4, sm_75, 16 GiB: no kernel image", "PYENGINE_CUDA_ARCHS=75")
    assert "torch is built for sm_80 sm_90" in finding.remedy


@pytest.mark.parametrize(("has_cuda", "status"), [(True, "ok"), (False, "warn")])
def test_a_device_with_and_without_cuda_kernels(device, has_cuda, status):
    device.has_cuda = has_cuda
    (finding,) = checks.cuda()
    assert_says(finding, status, "T4, sm_75, 16 GiB", "" if has_cuda else "PYENGINE_CUDA=1")


# --- The machine ---


def test_versions_name_the_packages_that_are_installed(monkeypatch):
    def installed(package):
        if package == "rich":
            return "14.0"
        raise PackageNotFoundError(package)

    monkeypatch.setattr(checks, "version", installed)
    finding = checks.versions()
    assert_says(finding, "ok", f"torch {torch.__version__} for ")
    assert finding.text.endswith(", rich 14.0")


@pytest.mark.parametrize(
    ("quota", "cores", "status", "text", "remedy"),
    [
        ("max", 4, "ok", "4 torch threads on 4 cores", ""),
        ("400000", 4, "ok", "a quota of 4", ""),
        ("250000", 4, "warn", "a quota of 2.5", "OMP_NUM_THREADS=2"),
        ("50000", 4, "warn", "a quota of 0.5", "OMP_NUM_THREADS=1"),
        ("max", 1, "warn", "4 torch threads on 1 cores", "OMP_NUM_THREADS=1"),
    ],
)
def test_threads_are_compared_with_cores_and_quota(monkeypatch, tmp_path, quota, cores, status, text, remedy):
    monkeypatch.setattr(checks, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert_says(checks.threads(), status, text, remedy)


@pytest.mark.parametrize(
    ("folder", "free", "status", "text", "remedy"),
    [
        ("", 64 * 2**20, "warn", "64 MiB free", "--shm-size"),
        ("", 2**33, "ok", "8192 MiB free", ""),
        ("none", 0, "ok", "does not need it", ""),
    ],
)
def test_shared_memory_is_enough(monkeypatch, tmp_path, folder, free, status, text, remedy):
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path / folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=free, free=free))
    assert_says(checks.shared_memory(), status, text, remedy)


def test_a_host_name_without_an_address(monkeypatch):
    def unknown(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert_says(checks.host(), "warn", "has no address (Name or service not known)", "/etc/hosts")


def test_settings_of_torch_and_its_backends_are_reported(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET", "mine")
    finding = checks.settings()
    assert "OMP_NUM_THREADS=3" in finding.text and "mine" not in finding.text


# --- Two workers ---


def test_workers_with_the_right_gradient(monkeypatch, ranks):
    monkeypatch.setattr(checks, "launch", lambda fn, workers, timeout_s: ranks(workers).run(fn))
    assert_says(checks.workers(), "ok", "exact on both")


@pytest.mark.parametrize(
    ("outcome", "text", "remedy"),
    [
        ([[1.0, 2.0]] * 2, "[[1.0, 2.0], [1.0, 2.0]], expected [0.75, 1.5, 2.25]", "report"),
        (OSError("the network is down"), "the network is down", "GLOO_SOCKET_IFNAME"),
        (TimeoutError(), "have not ended after 120 s", "GLOO_SOCKET_IFNAME"),
    ],
    ids=["wrong", "fails", "hangs"],
)
def test_workers_with_a_problem(monkeypatch, outcome, text, remedy):
    launch = mock.Mock(side_effect=[outcome])
    monkeypatch.setattr(checks, "launch", launch)
    assert_says(checks.workers(), "fail", text, remedy)
