"""Emulated hosts: network namespaces that are connected to one switch by shaped links.

A host sends through its interface eth0, which counts the bytes. Root and iproute2 are required. The name of a
namespace contains the id of the process that created it. The namespaces of killed processes are removed when
the next network is created.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PORT = 29500  # free in every network, because only the ranks use it
_NAME = "pyengine"


@dataclass(frozen=True)
class Host:
    """One host of a network.

    Attributes:
        space: the namespace of the host; "" is the namespace of this process.
        environment: variables for programs on the host: the address of rank 0 and the network interface.
    """

    space: str
    environment: Mapping[str, str]

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], out: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program on this host.

        Args:
            environment: variables that are added to those of the host and of this process.
            out: the file for the program's output; None for the output of this process.
        """
        return subprocess.Popen(
            ["ip", "netns", "exec", self.space, *command] if self.space else command,
            env={**os.environ, **self.environment, **environment},
            stdout=out,
            stderr=out,
        )


@contextmanager
def hosts(num: int, rate: int) -> Iterator[list[Host]]:
    """Create `num` hosts that send at `rate` Mbit/s; remove them on exit, including after SIGINT or SIGTERM.

    Raises:
        SystemExit: this process is not root, or iproute2 is missing.
    """
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("a network of several hosts needs root and iproute2 (ip, tc): run it as root")
    _sweep()
    spaces = [f"{_NAME}-{os.getpid()}-{index}" for index in range(num)]
    switch = f"{_NAME}-{os.getpid()}-switch"
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _run(f"ip netns add {switch}", f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for index, space in enumerate(spaces):
            _connect(space, index, switch, rate)
        environment = {"MASTER_ADDR": _address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        yield [Host(space, environment) for space in spaces]
    finally:
        for space in (*spaces, switch):
            _remove(space)
        signal.signal(signal.SIGTERM, before)


def can_make_hosts() -> bool:
    """Return whether this process is root, finds iproute2, and can create network namespaces."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    space = f"{_NAME}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", space], check=False, capture_output=True)
    _remove(space)
    return made.returncode == 0


@contextmanager
def alone(is_root: bool) -> Iterator[list[Host]]:
    """Create one host with only a loopback interface, which counts only the bytes of the host's programs.

    Without root, the host is this machine.
    """
    environment = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if not is_root:
        yield [Host("", environment | {"MASTER_PORT": str(29000 + os.getpid() % 2000)})]
        return
    _sweep()
    space = f"{_NAME}-{os.getpid()}-0"
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _run(f"ip netns add {space}", f"ip -n {space} link set lo up")
        yield [Host(space, environment | {"MASTER_PORT": str(PORT), "PYENGINE_BENCH_ALONE": "1"})]
    finally:
        _remove(space)
        signal.signal(signal.SIGTERM, before)


def sent_bytes(interface: str = "eth0") -> int:
    """Return how many bytes this host has sent so far, including headers."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def _connect(space: str, index: int, switch: str, rate: int) -> None:
    _run(f"ip netns add {space}")
    _run(f"ip link add eth0 netns {space} type veth peer name port{index} netns {switch}")
    _run(f"ip -n {switch} link set port{index} master bridge up", f"ip -n {space} link set lo up")
    _run(f"ip -n {space} addr add {_address(index)}/24 dev eth0", f"ip -n {space} link set eth0 up")
    burst = max(2**18, rate * 500)  # bytes that may leave at once, in one tick of the kernel's clock
    shape = f"tbf rate {rate}mbit burst {burst} latency 50ms"
    _run(f"tc -n {space} qdisc add dev eth0 root {shape}")


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


def _remove(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def _sweep() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name, _, rest = line.split()[0].partition("-")
        pid = rest.partition("-")[0]
        if name == _NAME and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(line.split()[0])


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)
