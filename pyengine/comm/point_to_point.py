"""Exchanges over gloo in which a rank is ready to receive before it sends.

gloo's own all-to-all and all-gather send first. If one rank is later than another, it sends its data before
the notification that it can receive, over the same connection. The other rank sends nothing until all of it
has arrived, so the link is used in one direction at a time, at half its rate. Point-to-point operations can
be posted in the better order.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pyengine.comm.watch import failure

_TAG = 0x70796567  # unused by users; operations of one tag are paired in the order in which ranks post them


class P2PWork:
    """Point-to-point operations as one work, whose wait may time out.

    That of gloo's works may not: a timeout closes their connection.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._future: Future[Any] = Future()

    def run(self) -> None:
        """Wait for all operations, on a thread of its own; the first error is reported at once."""
        for work in self._works:
            try:
                if work.wait() is False:
                    raise RuntimeError("a point-to-point operation was aborted")
            except Exception as error:  # noqa: BLE001 - raised by `wait`
                self._end(error)
        self._works = ()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._is_over.is_set():  # an earlier operation has failed
            return
        self._error = error
        self._is_over.set()
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def get_future(self) -> Future[Any]:
        return self._future


class PointToPoint:
    """Exchanges among the ranks of one gloo group, of tensors on the host.

    Cost: from the first exchange on a thread, which waits for exchanges in the order of their launch. It ends
    with `close`, with this object and with the interpreter, at most a second after these.
    """

    def __init__(self, find_group: Callable[[], dist.ProcessGroup | None], ranks: Sequence[int]) -> None:
        self._find_group, self._ranks = find_group, ranks
        self._rank = dist.get_rank(find_group())
        self._waiting: queue.SimpleQueue[P2PWork | None] = queue.SimpleQueue()
        self._close: Callable[[], object] | None = None
        self._is_broken = False

    def all_to_all(self, received: Tensor, parts: Tensor) -> P2PWork:
        return self._exchange(self._rows(received), self._rows(parts))

    def all_gather(self, gathered: Tensor, part: Tensor) -> P2PWork:
        return self._exchange(self._rows(gathered), [part] * len(self._ranks))

    def close(self) -> None:
        """End the thread, after the exchanges under way."""
        if self._close is not None:
            self._close()
        self._close = None

    def _rows(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.view(len(self._ranks), -1).unbind()

    def _exchange(self, arriving: Sequence[Tensor], leaving: Sequence[Tensor]) -> P2PWork:
        if self._is_broken:
            raise RuntimeError(failure("this rank was interrupted while it posted an exchange"))
        num = len(self._ranks)
        others = [(self._rank + step) % num for step in range(1, num)]  # each begins with another
        group = self._find_group()
        self._is_broken = True  # if an interrupt keeps some from being posted, peers would pair the next ones
        works = [dist.irecv(arriving[r], self._ranks[r], group, _TAG) for r in reversed(others)]
        works += [dist.isend(leaving[r], self._ranks[r], group, _TAG) for r in others]
        self._is_broken = False
        if arriving[self._rank].data_ptr() != leaving[self._rank].data_ptr():
            arriving[self._rank].copy_(leaving[self._rank])
        exchange = P2PWork([work for work in works if work is not None])
        if self._close is None:
            thread = threading.Thread(
                target=_wait, args=(self._waiting,), name="pyengine-transfers", daemon=True
            )
            self._close = weakref.finalize(self, _end, self._waiting, thread)
            thread.start()
        self._waiting.put(exchange)
        return exchange


def _wait(waiting: queue.SimpleQueue[P2PWork | None]) -> None:
    while (exchange := waiting.get()) is not None:
        exchange.run()


def _end(waiting: queue.SimpleQueue[P2PWork | None], thread: threading.Thread) -> None:
    waiting.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)
