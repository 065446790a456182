"""PyTorch's own names for what the loop knows: `no_sync` and `set_requires_gradient_sync` end windows as DDP
and FSDP do, in the backward; `detach` is `close`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from pyengine.engine.has_engine import HasEngine
from pyengine.engine.loop import single_micro_batch
from pyengine.window.counter import State


class TorchNames(HasEngine):
    """The part of `Sync` that loops written for DDP or FSDP call.

    Every `backward` is then a micro-batch of its own, and the one that runs while gradient sync is on ends
    the window.
    """

    _requires_sync: bool | None = None  # None: a loop of ours says which micro-batch is the last

    @abstractmethod
    def close(self) -> None:
        """See `Sync.close`."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backwards of the body accumulate only: none of them is the window's last.

        As DDP's: the first `sync.backward` behind the body ends the window and sends the gradients. The body
        may hold any number of micro-batches. `accumulate` is the longest window: a shorter one divides by its
        own count, as ever. Every rank brings the same number of windows, of any lengths (of equal ones over a
        sharded model, whose forwards are collective: only `windows` pads). Where the very first
        one may be of a single micro-batch, `set_requires_gradient_sync(True)` before it tells that its bare
        `backward` is meant.

        Raises:
            RuntimeError: inside a micro-batch of `windows` or `accumulate`, which know the last one
                themselves. From `backward`: it is the window's last by `accumulate`.
            ValueError: "exact" replays BatchNorms, and the forward would not know its micro-batch.

        Example:
            >>> for i, (x, y) in enumerate(loader, start=1):  # doctest: +SKIP
            ...     last = i % 8 == 0 or i == len(loader)
            ...     with nullcontext() if last else sync.no_sync():
            ...         sync.backward(loss_sum(model(x), y), count=len(y))
            ...     if last:
            ...         sync.step(optimizer)
        """
        before = self._requires_sync
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._requires_sync = before is None or before

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Say, until the next call, whether a `backward` ends its window: as FSDP's, and see `no_sync`.

        Args:
            requires_gradient_sync: False before the window's earlier micro-batches, True before its last one.

        Raises:
            TypeError: no bool.
            RuntimeError, ValueError: as `no_sync`.
        """
        if not isinstance(requires_gradient_sync, bool):
            raise TypeError(
                f"requires_gradient_sync={requires_gradient_sync!r} is a "
                f"{type(requires_gradient_sync).__name__}: need True for a window's last micro-batch, else "
                "False"
            )
        engine = self._engine
        if engine.counter.has_micro_batch_out:
            raise RuntimeError(
                "no_sync or set_requires_gradient_sync inside a micro-batch of sync.windows or "
                "sync.accumulate, which know the window's last one: leave it out"
            )
        if engine.batch_norms.num_modules:
            raise ValueError(
                "no_sync or set_requires_gradient_sync with accumulator='exact' over BatchNorms, whose "
                "statistics belong to a micro-batch from its forward on: put the forward and the backward "
                "into `with sync.accumulate(last=...):`"
            )
        self._requires_sync = requires_gradient_sync

    def detach(self) -> None:
        """Undo everything: the same as `close`.

        Hooks are off, `.grad` is None, or the caller's in memory of its own, and DDP's settings are those
        that `attach` found. DDP lets nobody take a communication hook off: the one that is left does what DDP
        does without any, the mean over ranks, in fp32. Another `attach` takes it over; another hook needs a
        new DistributedDataParallel around the same module.
        """
        self.close()

    def _begin_loop(self, name: str) -> None:
        """Let a loop of ours say again which micro-batch is the last."""
        if self._requires_sync is False:
            raise RuntimeError(
                f"{name} while gradient sync is off: it knows the window's last micro-batch itself; leave "
                "no_sync out, or call set_requires_gradient_sync(True) first"
            )
        self._requires_sync = None

    def _micro_batch_of_backward(self) -> AbstractContextManager[None]:
        """Return what makes a backward a micro-batch of its own where no loop has handed one out."""
        engine, counter = self._engine, self._engine.counter
        if counter.has_micro_batch_out:
            return nullcontext()
        if self._requires_sync is None and counter.accumulate == 1 and counter.state is State.IDLE:
            self._requires_sync = True  # there is nothing else that it could mean
        if self._requires_sync is None:
            return nullcontext()
        due = counter.due if counter.state is State.OPEN else counter.share
        if not self._requires_sync and len(due) == 1:
            raise RuntimeError(
                f"backward without sync in the last micro-batch of window {counter.index}, by "
                f"accumulate={counter.accumulate}: sync in it, or make the engine with the number of "
                "micro-batches of your longest window"
            )
        return single_micro_batch(engine, last=self._requires_sync)
