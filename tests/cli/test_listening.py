"""Commands whose workers are all on this machine do not listen where another machine could connect."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from marks import rest
from sockets import listened_on

SCRIPT = Path(__file__).with_name("listening_script.py")
TINY = {
    "launch": [sys.executable, str(SCRIPT)],
    "doctor": [sys.executable, "-m", "pyengine", "doctor"],
    "train": "train --model cnn --steps 2 --accumulate 2 --micro-batch 2 --json",
    "verify": "verify --model cnn --workers 2 --steps 1 --micro-batches 2 --json",
    "bench": "bench --rounds 3 --variants floor,engine --model small0 --json",
    "study": "study --model cnn --workers 1,2 --batch 16 --dataset-size 64 --epochs 1 --repeats 1 --json "
    "--out",
}
SOME = ("train",)  # its workers are started by `launch`
if not Path("/proc/self/net/tcp").exists():
    pytest.skip("the kernel's table of sockets is not at /proc", allow_module_level=True)


def command(name: str, folder: Path) -> list[str]:
    line = TINY[name]
    if isinstance(line, list):
        return line
    own = [str(folder / "study")] if name == "study" else []
    return [sys.executable, "-m", "pyengine", *line.split(), *own]


def elsewhere() -> list[str]:
    """Return a prefix that gives a command a host name of another network interface, as on a cluster.

    By default, gloo listens on that interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        address = probe.getsockname()[0]
    prefix = ["unshare", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "sh"]
    may = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("hostname")
    return prefix if may and subprocess.run([*prefix, "true"], check=False).returncode == 0 else []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, *rest(*(name for name in TINY if name not in SOME))])
def test_only_the_loopback_is_listened_on(name, tmp_path):
    addresses, code, said = listened_on([*elsewhere(), *command(name, tmp_path)])
    assert code == 0, said
    assert addresses, "nothing was seen to listen: the test looked too late, or in the wrong place"
    assert [address for address in addresses if not ipaddress.ip_address(address).is_loopback] == []
