"""torchrun on two hosts, as in docs/launch.md; the hosts are network namespaces with names and addresses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from marks import rest

EXAMPLE = Path(__file__).parents[2] / "examples" / "any_launcher.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d"]
RENDEZVOUS = ["--rdzv-id", "test", "--rdzv-endpoint", "host0:29500"]
NAMES = "127.0.0.1 localhost\n10.78.0.1 host0\n10.78.0.2 host1\n"
PIPE = subprocess.PIPE
pytestmark = pytest.mark.slow  # starts many processes
Process = subprocess.Popen[str]


class Host:
    """A network namespace; `ip netns exec` mounts the namespace's own hosts file over /etc/hosts."""

    def __init__(self, index: int) -> None:
        self.name, self.namespace = f"host{index}", f"pyengine-{os.getpid()}-{index}"
        self._etc = Path("/etc/netns", self.namespace)

    def add(self) -> None:
        _ip("netns", "add", self.namespace)
        self._etc.mkdir(parents=True)
        (self._etc / "hosts").write_text(NAMES)

    def connect(self, address: str) -> None:
        _ip("-n", self.namespace, "addr", "add", address, "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", self.namespace, "link", "set", device, "up")

    def torchrun(self, *arguments: str) -> Process:
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self.namespace, *named, *TORCHRUN, *RENDEZVOUS, *arguments]
        return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)

    def kill(self) -> None:
        for pid in _ip("netns", "pids", self.namespace).split():
            os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        if Path("/run/netns", self.namespace).exists():
            self.kill()
            _ip("netns", "del", self.namespace)
        shutil.rmtree(self._etc, ignore_errors=True)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def namespaces():
    """Create two hosts that are connected by a virtual cable."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and unshare")
    first, second = hosts = Host(0), Host(1)
    try:
        try:
            for host in hosts:
                host.add()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this root may not make network namespaces: {error.stderr.strip()}")
        cable = ["link", "add", "eth0", "netns", first.namespace, "type", "veth", "peer", "name", "eth0"]
        _ip(*cable, "netns", second.namespace)
        first.connect("10.78.0.1/24")
        second.connect("10.78.0.2/24")
        yield hosts
    finally:
        for host in hosts:
            host.remove()


@pytest.fixture
def hosts(namespaces):
    """Return the hosts, and kill the processes that a test has left there."""
    yield namespaces
    for host in namespaces:
        host.kill()


@pytest.fixture(scope="module")
def printed():
    """Return the output of the script on one host, where it starts two workers itself."""
    done = forked.python(str(EXAMPLE), cwd=EXAMPLE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _ended(hosts: tuple[Host, Host], processes: list[Process]) -> list[tuple[str, str]]:
    """Return the output of both hosts; if a host hangs, the error contains the output."""
    try:
        return [process.communicate(timeout=300) for process in processes]
    except subprocess.TimeoutExpired:
        for host in hosts:
            host.kill()
        printed = [process.communicate() for process in processes]
        raise AssertionError(f"a host has not ended; both printed {printed}") from None


@pytest.mark.parametrize("per_host", [*rest("1"), "2"])
def test_two_hosts_print_what_one_prints(hosts, printed, per_host):
    processes = [host.torchrun("--nproc-per-node", per_host, str(EXAMPLE)) for host in hosts]
    (said, errors), (nothing, other_errors) = _ended(hosts, processes)
    assert [process.returncode for process in processes] == [0, 0], errors + other_errors
    assert (said, nothing) == (printed, "")  # rank 0 is on the host whose name sorts first
    assert "parameters " in printed


def test_a_host_that_dies_ends_the_run_on_the_other(hosts):
    train = ["-m", "pyengine", "train", "--model", "cnn", "--json", "--steps", "10000", "--micro-batch", "2"]
    processes = [host.torchrun(*train) for host in hosts]
    assert processes[0].stdout is not None
    assert '"workers": 2' in processes[0].stdout.readline()
    assert '"event": "step"' in processes[0].stdout.readline()
    hosts[1].kill()
    _, errors = processes[0].communicate(timeout=300)
    assert processes[0].returncode == 1
    assert "Connection closed by peer" in errors or "Connection reset by peer" in errors
