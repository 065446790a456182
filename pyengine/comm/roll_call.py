"""Who still answers when a collective has failed: backends name a port, users need a rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

# Ranks that wait in the same collective fail within milliseconds of each other, or at the same timeout.
WAIT_S = 2.0


class RollCall:
    """The ranks of one group, asked through its store once a collective has failed.

    Args:
        group: the group; it is not kept, only its store.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        pg = dist.group.WORLD if group is None else group
        assert pg is not None  # it has told our rank
        self._store: dist.Store = _get_process_group_store(pg)
        self._found: str | None = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add to what the body, a collective, raises which ranks do not answer.

        Raises:
            RuntimeError: in place of the backend's, whose text it holds.

        Cost: nothing unless the body raises; then at most two seconds, once.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "a collective failed" in str(error):
                raise
            if self._found is None:
                self._found = self._call()
            raise RuntimeError(
                f"a collective failed: {self._found}. Start all ranks anew, from a checkpoint ({error})"
            ) from error

    def _call(self) -> str:
        try:
            absent = self._absent()
        except RuntimeError:
            return (
                "the store that the ranks met in does not answer, so the process that keeps it has died "
                "(rank 0 or the launcher)"
            )
        if not absent:
            return f"all {self._world_size} ranks answer, so one of them came later than the group's timeout"
        ranks = ", ".join(map(str, absent))
        return (
            f"rank {ranks} of {self._world_size} did not answer within {WAIT_S:g} s of it, and has died, "
            "hangs, or is busy elsewhere"
        )

    def _absent(self) -> list[int]:
        """Say that this rank is there, and return those that do not."""
        self._store.set(_answer(self._rank), "here")
        end = time.monotonic() + WAIT_S
        absent = list(range(self._world_size))
        while absent := [rank for rank in absent if not self._store.check([_answer(rank)])]:
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return absent


def _answer(rank: int) -> str:
    return f"pyengine/answer/{rank}"
