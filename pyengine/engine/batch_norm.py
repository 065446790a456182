"""BatchNorm's running statistics, the same whichever rank ran which micro-batch.

While a window is open, every BatchNorm in training mode writes into a row of its own for each micro-batch,
which begins as zeros, with its own arithmetic. So a row holds what the micro-batch adds to the running
average, whatever that is, and how often the module was called. The rows of all ranks are summed as integers,
a rank's being zero in the others' places, and every rank replays them in the order of the window.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from pyengine.comm.base import Comm, Work
from pyengine.ops.device import send
from pyengine.window.header import Header

# Mean, variance and number of batches.
_Row = tuple[Tensor, ...]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_ALIGNMENT = 64  # elements: a module finds its row as aligned as a tensor of its own would be
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def _mean(module: _BatchNorm) -> Tensor:
    assert module.running_mean is not None
    return module.running_mean


def batch_norm_problems(module: nn.Module) -> Iterator[str]:
    """Report which BatchNorms cannot be made independent of the world size."""
    for name, m in module.named_modules():
        if isinstance(m, nn.SyncBatchNorm):
            yield (
                f"{name or 'the module'} is a SyncBatchNorm: with accumulator='exact' a micro-batch's "
                "statistics must not depend on what other ranks compute at the same time. Use BatchNorm, "
                "whose running statistics the engine replays, or GroupNorm"
            )
    kinds = sorted({str(_mean(m).dtype).removeprefix("torch.") for m in batch_norms(module)})
    if len(kinds) > 1:
        yield (
            f"running statistics are {' and '.join(kinds)}: accumulator='exact' needs one type for all "
            "BatchNorms"
        )


class BatchNormReplay:
    """Keeps running statistics out of the forwards of a window, and replays them when it is used.

    A forward counts for the micro-batch handed out last, or, where several were handed out first, for the one
    whose backward comes next. Several calls in a micro-batch count one after the other. Forwards inside a
    backward (recomputation by activation checkpointing) and those between a micro-batch's last backward and
    the next one do not count; those outside windows do what they always do. Outside its own forward a module
    always holds its real statistics.

    Args:
        module: one without any BatchNorm costs nothing.
        most: micro-batches that this rank may run in a window.
        total: places in a window, over all ranks.

    Cost: a window allocates (`most` + `total`) rows of 4 bytes a running value and BatchNorm, and sends the
    latter part in one collective behind the buckets.
    """

    def __init__(self, module: nn.Module, *, most: int, total: int) -> None:
        self._modules = batch_norms(module)
        self._total = total
        self._target = _Target()
        self._places: list[int] = []
        self._tables: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._rows: Tensor | None = None
        self._work: Work | None = None
        self._others = BufferWatch(module, self._buffers(*_STATISTICS))
        if not self._modules:
            return
        kind = _mean(self._modules[0])
        self._sizes = [m.num_features for m in self._modules for _ in range(2)]
        self._widths = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes]
        columns = torch.tensor(self._widths, dtype=torch.int64, device=kind.device).view(-1, 2).sum(1)
        self._owner = torch.arange(len(self._modules), dtype=torch.int64, device=kind.device)
        self._owner = self._owner.repeat_interleave(columns)
        num_rows = most + 1  # the last one is for calls that do not count
        self._stats = kind.new_zeros(num_rows, sum(self._widths))
        self._calls = self._owner.new_zeros(num_rows, len(self._modules))
        self._tables = [self._stats, self._calls]
        self._target.rows = [
            list(zip(values[::2], values[1::2], calls.unbind(), strict=True))
            for values, calls in zip(map(self._pieces, self._stats), self._calls, strict=True)
        ]
        for index, bn in enumerate(self._modules):
            _row_hooks(bn).target, _row_hooks(bn).index = self._target, index

    @property
    def num_modules(self) -> int:
        return len(self._modules)

    def open(self) -> None:
        self._others.open()
        self._places, self._saved = [], self.forms()
        if self._modules:
            self._stats.zero_()
            self._calls.zero_()
            self._target.open()

    def hand_out(self, place: int) -> None:
        """Give a micro-batch its row; `place` is its index in the window, over all ranks."""
        self._places.append(place)
        self._target.hand_out()

    def save(self) -> list[Tensor]:
        """Return copies of this window's rows and calls, in the order of hand-out, if there are any."""
        if not self._modules:
            return []
        taken = len(self._places) - len(self._saved[0])
        return [torch.cat([old, new[:taken]]) for old, new in zip(self._saved, self._tables, strict=True)]

    def forms(self) -> list[Tensor]:
        """Return what `save` would for a window without micro-batches: tables without rows."""
        return [table[:0] for table in self._tables]

    def load(self, places: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Load, in a window that has just been opened, what `save` returned for these places; read only."""
        self._places = list(places)
        if rows:
            self._saved = [part.to(own) for part, own in zip(rows, self._tables, strict=True)]

    def micro_batch(self, *, due: bool) -> AbstractContextManager[None]:
        """Count forwards in the body that are in no backward; after it none, unless more are `due`."""
        return nullcontext() if self._target.row is None else self._counted(due=due)

    @contextmanager
    def _counted(self, *, due: bool) -> Iterator[None]:
        self._target.may_be_in_backward = True
        try:
            yield
        finally:
            self._target.use_spare_row()
            self._target.count_backward()
            if due:
                self._target.use_next_row()

    def keep_rows(self) -> Callable[[], None]:
        """Return a function that undoes what the forwards from here on write to rows."""
        kept = [table.clone() for table in self._tables]

        def undo() -> None:
            for table, values in zip(self._tables, kept, strict=True):
                table.data.copy_(values)

        return undo

    def drop(self, is_dropped: bool | Tensor) -> None:
        """Leave out the statistics of the micro-batch whose backwards have run, if `is_dropped`, unread."""
        if self._modules and is_dropped is not False:
            for table in self._tables:
                row = table[self._target.done]
                flag = torch.as_tensor(is_dropped, dtype=torch.bool, device=row.device)
                row.copy_(torch.where(flag, 0, row))

    def stop_counting(self) -> None:
        """Count no further forward: the micro-batch's last backward begins."""
        if self._modules:
            self._target.use_spare_row()

    def start_exchange(self, comm: Comm, header: Header) -> None:
        """Launch the exchange of the window's rows, behind its buckets and a header in which ranks agree.

        One all-reduce of `total` rows, 4 bytes a running value and module (8 where those are float64), not
        waited for; see [Note: order of collectives in a window] in engine.py. Nothing without BatchNorms.
        """
        if not self._modules or header.is_refused():
            return
        wide = torch.promote_types(self._stats.dtype, torch.float32)
        whole, width = _INTEGERS[wide], self._stats.shape[1]
        # The bits as integers: adding zeros keeps them all, those of -0 and nan too.
        self._rows = self._stats.new_zeros(self._total, width + len(self._modules), dtype=whole)
        values, calls = self.save()
        places = send(self._places, torch.int64, values.device)
        self._rows[places] = torch.cat([values.to(wide).view(whole), calls.to(whole)], 1)
        self._work = comm.all_reduce(self._rows)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def apply(self, is_good: Tensor) -> None:
        """Add the window to the running statistics, in place, once, if it `is_good`."""
        if self._rows is not None:
            self._replay(self._rows, is_good)
        self._others.close()
        self.close()

    def close(self) -> None:
        """End the window; what has not been applied is dropped."""
        self._target.row = None
        self._rows = self._work = None

    def release(self) -> None:
        for bn in self._modules:
            if (hooks := _row_hooks(bn)).target is self._target:
                hooks.remove()

    @torch.no_grad()
    def _replay(self, rows: Tensor, is_good: Tensor) -> None:
        width = self._stats.shape[1]
        values = rows[:, :width].contiguous().view(torch.promote_types(self._stats.dtype, torch.float32))
        calls = rows[:, width:].double()
        statistics, counters = self._buffers(*_STATISTICS[:2]), self._buffers(_STATISTICS[2])
        before, tracked = torch.zeros_like(values[0], dtype=torch.float64), torch.stack(counters)
        torch._foreach_copy_(self._pieces(before), statistics)
        now = before.clone()
        for row, keep, add in zip(values, *self._factors(calls, tracked), strict=True):
            now.mul_(keep[self._owner]).add_(row.double().mul_(add[self._owner]))
        now = torch.where(is_good, now, before)
        tracked = tracked + calls.sum(0).long() * is_good
        torch._foreach_copy_(statistics, self._pieces(now.to(self._stats.dtype)))
        torch._foreach_copy_(counters, list(tracked.unbind()))

    def _factors(self, calls: Tensor, tracked: Tensor) -> tuple[Tensor, Tensor]:
        """Return what multiplies the average so far and the row, float64 `[micro-batches, modules]`."""
        momenta = [m.momentum for m in self._modules]
        momentum = send([0.0 if m is None else m for m in momenta], torch.float64, calls.device)
        is_mean = send([m is None for m in momenta], torch.bool, calls.device)
        after = tracked + calls.cumsum(0)
        share = calls / after.clamp(min=1)  # of a plain mean over all batches so far
        keep = torch.where(is_mean, 1 - share, (1 - momentum) ** calls)
        return keep, torch.where(is_mean, share, 1.0)

    def _pieces(self, row: Tensor) -> list[Tensor]:
        """Return every module's mean and variance in a row, as views."""
        return [place[:size] for place, size in zip(row.split(self._widths), self._sizes, strict=True)]

    def _buffers(self, *names: str) -> list[Any]:
        return [getattr(m, name) for m in self._modules for name in names]


class _Target:
    """Where calls in training mode write: a micro-batch's row, or the last one, which does not count."""

    def __init__(self) -> None:
        self.rows: list[list[_Row]] = [[]]  # `[accumulate + 1][modules]` of (mean, variance, calls)
        # The one in use; None: modules write into their own statistics. Modules only read this and set
        # `was_called`, so that torch.compile can trace them once for all micro-batches.
        self.row: list[_Row] | None = None
        self.was_called = False
        # Whether a call has to find out if a backward runs, which torch.compile cannot trace.
        self.may_be_in_backward = False

    def open(self) -> None:
        self._next = self._handed = 0
        self.done = 0  # micro-batches whose backwards have run
        self.row, self.was_called = self.rows[-1], False

    def hand_out(self) -> None:
        if self.row is not None:
            self._handed += 1
            self.use_next_row()

    def use_next_row(self) -> None:
        """Give later calls a row that no micro-batch has yet."""
        self.use_spare_row()
        self.row = self.rows[min(self._next, self._handed - 1)]

    def count_backward(self) -> None:
        """Note that a micro-batch is done: the next one has another row, even if this one called nothing."""
        self.done += 1
        self._next = max(self._next, self.done)

    def use_spare_row(self) -> None:
        """Do not count later calls."""
        self._next += self.was_called and self.row is not self.rows[-1]
        self.row, self.was_called, self.may_be_in_backward = self.rows[-1], False, False


class _RowHooks:
    """The hooks by which one module writes into rows: those of the engine made last. A copy or pickle of the
    module gets some that do nothing.
    """

    def __init__(self) -> None:
        self.target, self.index = _Target(), 0
        self._own: _Row | None = None
        self._handles: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _RowHooks, ()

    def register(self, module: nn.Module) -> None:
        self._handles = [
            module.register_forward_pre_hook(self.before),
            module.register_forward_hook(self.after, always_call=True),
        ]

    def remove(self) -> None:
        """Remove them; the copies of them that a copied module has do nothing any more."""
        self.target = _Target()
        for handle in self._handles:
            handle.remove()

    def before(self, module: nn.Module, args: Any) -> None:
        """Give the module a row in place of its running statistics."""
        del args
        target = self.target
        if target.row is None or not module.training:
            return
        if target.may_be_in_backward and torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - whether a backward runs
            self._own = _swap(module, target.rows[-1][self.index])
            return
        target.was_called = True
        self._own = _swap(module, target.row[self.index])

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Give the module its running statistics back, also after an exception."""
        del args, output
        if self._own is not None:
            _swap(module, self._own)
            self._own = None


def _row_hooks(module: nn.Module) -> _RowHooks:
    """Return the module's hooks; register them if need be."""
    for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - torch lists hooks nowhere else
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _RowHooks):
            return owner
    hooks = _RowHooks()
    hooks.register(module)
    return hooks


def _swap(module: nn.Module, row: _Row) -> _Row:
    buffers = module._buffers  # noqa: SLF001 - entries are exchanged, past __setattr__
    mean, var, calls = (buffers[name] for name in _STATISTICS)
    assert mean is not None and var is not None and calls is not None
    for name, buffer in zip(_STATISTICS, row, strict=True):
        buffers[name] = buffer
    return mean, var, calls


# ---- other buffers: their values may depend on which rank ran what ----


class BufferWatch:
    """Warns once, after the first window, of buffers that it has written to, but those of `known`."""

    def __init__(self, module: nn.Module, known: list[Tensor]) -> None:
        self._module = module
        self._known = {id(buffer) for buffer in known}
        self._before: dict[str, tuple[int, int]] | None = None  # of the open window, if it is to be compared
        self._is_done = False

    def open(self) -> None:
        if not self._is_done:
            self._before = self._state()

    def close(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        self._is_done = True
        changed = [name for name, state in self._state().items() if before.get(name) != state]
        if changed:
            names = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            warnings.warn(
                f"accumulator='exact': the first window changed the buffers {names}. If their values depend "
                "on the micro-batches that this rank ran, or on how many, the run depends on the world "
                "size: update them between windows, from values that are equal on every rank, or keep them "
                "out of the forward (InstanceNorm: track_running_stats=False)",
                stacklevel=4,
            )

    def _state(self) -> dict[str, tuple[int, int]]:
        """Identity and version of every buffer; PyTorch counts a tensor's versions up with every write."""
        return {
            name: (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for name, buffer in self._module.named_buffers()
            if id(buffer) not in self._known
        }
