"""Names the ranks that do not answer after a failed collective: backends name a port, users need a rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from pyengine.comm.groups import GroupUsage
from pyengine.comm.watch.pending import listed
from pyengine.comm.watch.stall import STORE_IS_GONE, StallWatch, failure

_log = logging.getLogger("pyengine.comm")

# Ranks that wait in the same collective fail within milliseconds of each other, or at the same timeout.
WAIT_S = 2.0


class RollCall:
    """Names the ranks that do not answer after a failed collective. Without a store it cannot.

    Attributes:
        watch: knows which ranks have died, and the error that all ranks raise; or None.
    """

    def __init__(self) -> None:
        self.watch: StallWatch | None = None

    def named(self) -> AbstractContextManager[None]:
        """Add the ranks that do not answer to the error of the body, a collective. Default: add nothing."""
        return nullcontext()

    def break_off(self, error: Exception) -> None:
        """Start no further collective: this rank could not start one that other ranks are in.

        Args:
            error: why this rank could not start it.

        Default: nothing is noted.
        """


class StoreRollCall(RollCall):
    """Asks the ranks of a group through its store.

    Args:
        group: the group; only its store is kept, not the group.

    Attributes:
        store: store of the group.
        usage: use of an engine's own group, which serves no other engine once a collective has failed; or
            None.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        pg = dist.group.WORLD if group is None else group
        assert pg is not None  # this rank is a member
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(pg)
        self.store: dist.Store = _get_process_group_store(pg)
        self.usage: GroupUsage | None = None
        self._found: str | None = None
        self._broken = ""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the ranks that do not answer to the error of the body, a collective.

        Raises:
            RuntimeError: in place of the backend's error, whose text it contains; or because another
                collective of any rank has failed.

        Cost: nothing unless the body raises; then at most two seconds, once.
        """
        if self.watch is not None:
            self.watch.check()
        if self._broken:
            raise RuntimeError(self._broken)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.usage is not None:
                self.usage.is_broken = True
            if "a collective failed" in str(error):
                raise
            if self._found is None:
                self._found = self._call() or _all_answer(len(self._ranks))
            # A verdict is the same text on all ranks, so nothing of this rank's backend is added.
            has_verdict = self.watch is not None and self.watch.verdict
            raise RuntimeError(failure(self._found, None if has_verdict else error)) from error

    def break_off(self, error: Exception) -> None:
        """Start no further collective here, and let those of other ranks fail where a watch runs.

        gloo ends a process that receives other sizes than it waits for.
        """
        if self.usage is not None:
            self.usage.is_broken = True
        if self._broken or "a collective failed" in str(error):
            self._broken = self._broken or str(error)
            return
        _log.debug("start no further collective in this group: %r", error)
        finding = f"rank {self._rank} could not start one that the other ranks are in ({error!r})"
        self._broken = failure(finding)
        if self.watch is not None:
            with suppress(RuntimeError):  # the store is gone: the other ranks see this process end
                self.watch.conclude(finding)

    def _call(self) -> str:
        try:
            found = self._finding()
            return found if self.watch is None or not found else self.watch.conclude(found)
        except RuntimeError:
            return STORE_IS_GONE

    def _finding(self) -> str:
        absent = self._absent()
        if not absent:
            return ""
        dead = [] if self.watch is None else self.watch.dead(absent)
        if self.watch is not None and dead:
            return self.watch.describe_dead(dead)
        return (
            f"{listed(absent)} of {len(self._ranks)} did not answer within {WAIT_S:g} s of it: dead, "
            "hanging, or running other code"
        )

    def _absent(self) -> list[int]:
        """Answer for this rank; return the ranks that neither answer nor wait in a collective."""
        self.store.set(_answer(self._rank), "here")
        end = time.monotonic() + WAIT_S
        absent = self._ranks
        while absent := [rank for rank in absent if not self.store.check([_answer(rank)])]:
            if time.monotonic() > end or (self.watch is not None and self.watch.is_decided(absent)):
                break
            time.sleep(0.02)
        if self.watch is None:
            return absent
        waiting = set(self.watch.waiting(absent)) - set(self.watch.dead(absent))
        return [rank for rank in absent if rank not in waiting]


def _answer(rank: int) -> str:
    return f"pyengine/answer/{rank}"


def _all_answer(world_size: int) -> str:
    return f"all {world_size} ranks answer, so one of them launched it later than the group's timeout"
