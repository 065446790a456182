"""The state that each rank publishes while it works, through the store of its group."""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from pyengine.comm.watch.process_state import ProcessId

# A store that does not answer for so long is regarded as gone.
_STORE_TIMEOUT = timedelta(seconds=5)

_OURS = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep


@dataclass(frozen=True)
class Heartbeat:
    """State of one rank at one moment.

    Attributes:
        process: process of the rank.
        beat: number of this heartbeat, from 1.
        position: description of its step, window and micro-batch.
        line: innermost line of the user's code that the rank's thread is in.
        waits: description of the collective that the rank waits in; empty if it waits in none.
        launched: number of collectives that the rank has launched, by group.
    """

    process: ProcessId
    beat: int
    position: str
    line: str
    waits: str
    launched: dict[str, int]

    def to_json(self) -> str:
        """Serialize to text."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes) -> Heartbeat | None:
        """Deserialize the output of `to_json`; None if `text` is something else."""
        try:
            fields = json.loads(text)
            beat = cls(**{**fields, "process": ProcessId(**fields["process"])})
            process, launched = beat.process, dict(beat.launched)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        numbers = (process.pid, beat.beat, *launched.values())
        words = (process.host, process.space, process.started, beat.position, beat.line, beat.waits)
        is_one = all(isinstance(n, int) for n in numbers) and all(isinstance(w, str) for w in words)
        return beat if is_one else None


class Board:
    """The keys of one engine in the store of its group.

    Args:
        store: store of the group. The first use after `announce` opens a second connection, for another
            thread. Not earlier: a new connection to a file store reads the whole file, which short-lived
            engines need not pay for.
        rank: this rank, as the default group numbers it.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        # All ranks make their engines in the same order, so they have the same numbers.
        number = store.add(f"pyengine/engines/{rank}", 1)
        self._origin, self._prefix = store, f"pyengine/stall/{number}"
        self._rank = rank
        self._lock = threading.Lock()
        self._own: dist.Store | None = None

    @property
    def _store(self) -> dist.Store:
        with self._lock:
            if self._own is None:
                own = self._origin.clone() if hasattr(self._origin, "clone") else self._origin
                if own is not self._origin:
                    own.set_timeout(_STORE_TIMEOUT)
                self._own = dist.PrefixStore(self._prefix, own)
            return self._own

    def announce(self, beat: Heartbeat) -> None:
        """Post the first heartbeat; called by the thread that uses the group's store."""
        dist.PrefixStore(self._prefix, self._origin).set(f"beat/{self._rank}", beat.to_json())

    def post(self, beat: Heartbeat) -> None:
        """Post a heartbeat."""
        self._store.set(f"beat/{self._rank}", beat.to_json())

    def read(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank that has posted a readable one."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        beats = {rank: Heartbeat.of_json(self._store.get(key)) for rank, key in keys.items()}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def verdict(self) -> str:
        """Return the error that all ranks raise; empty if there is none."""
        return self._store.get("verdict").decode(errors="replace") if self._store.check(["verdict"]) else ""

    def publish(self, verdict: str) -> str:
        """Publish the error that all ranks raise; return the one that was published first."""
        return self._store.compare_set("verdict", "", verdict).decode(errors="replace")


def line_of(thread: int) -> str:
    """Return the line that a thread is in, and the function of this package that this line called.

    It is the innermost line outside of PyTorch, Python's library and this package.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, despite its name
    innermost, called = frame, ""
    while frame is not None and _is_library(frame):
        if frame.f_code.co_filename.startswith(_OURS):
            called = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        frame = frame.f_back
    if frame is None:
        frame = innermost
    if frame is None:
        return "a thread that has ended"
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    inside = f" (in pyengine's {called})" if called else ""
    return f"{name}:{number} in {frame.f_code.co_name}{inside}" + (f": {text}" if text else "")


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    in_python = name.startswith(_PYTHON) and "site-packages" not in name and "dist-packages" not in name
    return in_python or name.startswith((_OURS, _TORCH, "<frozen"))
