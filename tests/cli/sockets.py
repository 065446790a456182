"""The addresses that a program and its child processes listen on, read from /proc."""

from __future__ import annotations

import ipaddress
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h


def listened_on(command: Sequence[str], *, timeout_s: float = 300) -> tuple[set[str], int, str]:
    """Run a command; return the addresses that it and its children listened on, its exit code and output."""
    found: set[str] = set()
    end = time.monotonic() + timeout_s
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            found |= {address for pid in _family(process.pid) for address in _listening(pid)}
            if time.monotonic() > end:
                process.kill()
            time.sleep(0.02)
        said.seek(0)
        return found, process.returncode, said.read()


def _family(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has ended
    family = [pid]
    for member in family:  # grows during the loop
        family += [child for child, parent in parents.items() if parent == member]
    return family


def _listening(pid: int) -> Iterator[str]:
    """Yield the addresses that a process listens on."""
    folder = Path("/proc", str(pid))
    try:
        targets = [os.readlink(fd) for fd in (folder / "fd").iterdir()]
        lines = [line for table in ("tcp", "tcp6") for line in _table(folder / "net" / table)]
    except OSError:
        return  # the process has ended
    own = {match[1] for target in targets if (match := re.fullmatch(r"socket:\[(\d+)\]", target))}
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTEN and fields[9] in own:
            yield _address(fields[1].partition(":")[0])


def _table(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:] if path.exists() else []


def _address(digits: str) -> str:
    """Parse an address that the kernel prints as 32-bit words in the machine's byte order."""
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
