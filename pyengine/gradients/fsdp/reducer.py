"""Gradients of FSDP2 models, which the engine reduces once per window.

Before the window's last backward, `.grad` of the unsharded parameters holds the sums. FSDP2 computes the sum
over ranks without a division, and the engine multiplies the sum by 1/count.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.gradients.arrival import graph_leaves
from pyengine.gradients.base import Reducer, Residuals
from pyengine.gradients.fsdp.private import has_run, reduce_dtype, reset_iter_state
from pyengine.gradients.fsdp.replay import Replay, copy_buffers
from pyengine.gradients.fsdp.traffic import ShardWire
from pyengine.gradients.fsdp.units import Unit
from pyengine.gradients.fsdp.unsharded import Unsharded
from pyengine.gradients.grad_record import GradRecord
from pyengine.gradients.marks import REMEDY
from pyengine.gradients.padding import Padding
from pyengine.gradients.published import Published
from pyengine.gradients.settings import Settings
from pyengine.gradients.used_anywhere import UsedAnywhere, UsedFlags
from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.window.verdict import check_agreement
from pyengine.wire import FP32, Wire

_log = logging.getLogger("pyengine.gradients")


@dataclass(frozen=True)
class Managed:
    """A model prepared by `fully_shard` or `replicate`, and the arguments of the engine."""

    model: nn.Module  # The outermost unit.
    named: Sequence[tuple[str, Parameter]]  # The sharded parameters of the units, in registration order.
    units: Sequence[Unit]
    counted: Sequence[bool]  # Per parameter, whether this rank includes its local tensor in the norm.
    comm: Comm  # The transport over all ranks of the engine.
    settings: Settings


class ShardedPadding(Padding):
    """Padding micro-batches of a sharded model.

    Args:
        ignored: parameters of the model that the engine does not reduce.
    """

    def __init__(self, model: nn.Module, unsharded: Unsharded, ignored: Sequence[Parameter]) -> None:
        self._model, self._unsharded, self._ignored = model, unsharded, ignored
        self._restore_buffers: Callable[[], None] | None = None
        # The caller's leaf tensors and their gradients, set aside while padding runs; by id of the leaf.
        self._preserved: dict[int, tuple[Tensor, Tensor | None]] = {}

    def begin(self) -> None:
        self.end()
        self._restore_buffers = copy_buffers(self._model)
        self._unsharded.is_void = True

    def preserve_grads(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        ours = {id(param) for param in self._unsharded.grad_holders()}
        for leaf in [*self._ignored, *graph_leaves(roots)]:
            if id(leaf) not in ours and id(leaf) not in self._preserved:
                self._preserved[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def end(self) -> None:
        """Restore the buffers, and the gradients of the caller's leaf tensors."""
        for leaf, grad in self._preserved.values():
            leaf.grad = grad
        self._preserved = {}
        if self._restore_buffers is not None:
            self._restore_buffers()
            self._restore_buffers = None
        self._unsharded.is_void = False


class ShardedGradRecord(GradRecord):
    """A record that also reports gradients that a backward has left in unsharded parameters."""

    def __init__(self, params: Sequence[Parameter], unsharded: Unsharded) -> None:
        super().__init__(params)
        self._unsharded = unsharded

    def record(self) -> None:
        super().record()
        self.clear_outside()

    def outside(self) -> Sequence[int]:
        return sorted(self._unsharded.arrived)

    def clear_outside(self) -> None:
        self._unsharded.arrived.clear()


class ShardedReducer(Reducer):
    """Gradients of a sharded model, whose FSDP2 units reduce them when the window ends."""

    has_collective_forwards = True

    def __init__(self, managed: Managed) -> None:
        self.names: Sequence[str] = [name for name, _ in managed.named]
        self.params: Sequence[Parameter] = [param for _, param in managed.named]
        self.counted: Sequence[bool] = managed.counted
        placed: Sequence[Any] = self.params
        self.holds_all = all(each.is_replicate() for param in placed for each in param.placements)
        self.units, self.comm = managed.units, managed.comm
        self.held_bytes = sum(unit.held_bytes for unit in self.units)
        self.gathers_in_each_micro_batch = any(unit.gathers_in_each_micro_batch for unit in self.units)
        self.model: Any = managed.model
        self.wire = ShardWire(managed.settings.wire, managed.comm)
        self.used = UsedAnywhere(self.comm, self.params[0].device)
        names = {id(param): name for name, param in managed.named}
        for unit in self.units:
            unit.attach(self.wire, names)
        self.unsharded = Unsharded(managed.model, self.units, self.params, settings=managed.settings)
        # Called by `release`, or when the engine is freed without `close`.
        self._give_back = finalize(self, _give_back, self.units, self.unsharded)
        self._give_back.atexit = False
        self.is_clean = True  # whether FSDP has no state left from an unfinished window
        self._divisor: Divisor | None = None
        self._used_flags: UsedFlags | None = None
        self._has_warned = False
        # Use a weak reference, because parameter hooks refer to `unsharded`, and Python's garbage collector
        # does not see these hooks.
        warn = WeakMethod(self._warn_of_bare_backwards)
        self.unsharded.on_repeat = lambda: own() if (own := warn()) is not None else None
        ignored = [param for param in managed.model.parameters() if id(param) not in names]
        self.padding: ShardedPadding = ShardedPadding(managed.model, self.unsharded, ignored)
        self.grad_record = ShardedGradRecord(self.params, self.unsharded)

    def open(self) -> None:
        """Open a window, in which only the last backward reduces deferred gradients."""
        self.reset()
        self.padding.end()
        self.is_clean, self._divisor, self._used_flags = False, None, None
        for unit in self.units:
            unit.open()

    def abandon(self) -> None:
        """Reshard parameters that the window has kept unsharded in the compute dtype."""
        self.reset()
        for unit in self.units:
            unit.close()

    def begin(self) -> None:
        for param in self.params:
            param.grad = None
        self.unsharded.begin()
        super().begin()

    def _warn_of_bare_backwards(self) -> None:
        """Warn once if two backwards run between windows without an optimizer step."""
        if self.is_clean and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{REMEDY}: outside of a window no unit of the model reduces its gradients, and .grad stays "
                "as it is. (If this is intended, call sync.close())",
                stacklevel=2,
            )

    def is_used(self, index: int) -> bool:
        return self.unsharded.used[index] or self.params[index].grad is not None

    def release(self, *, keeps_grad: bool) -> None:
        """Restore the units, so that every backward reduces gradients again."""
        self.reset()
        self.padding.end()
        self._give_back()
        if not keeps_grad:
            for param in self.params:
                param.grad = None

    def make_divisor(self, header: Header, wire: Wire) -> Divisor:
        """Create the window's divisor.

        Raises an error if ranks disagree in the header, because otherwise FSDP would hang.
        """
        if header.is_refused():
            check_agreement(header, header.totals(), self.comm)
        self._divisor = Divisor(header.inv_count, wire, header.inv_scale)
        return self._divisor

    def reset(self) -> None:
        """Discard the state that an unfinished window has left in FSDP."""
        if not self.is_clean and has_run(self.model):
            reset_iter_state(self.model)
        self.is_clean = True


def _give_back(units: Sequence[Unit], unsharded: Unsharded) -> None:
    unsharded.release()
    for unit in units:
        unit.release()


class FSDPReducer(ShardedReducer):
    """Gradients that `fully_shard` or `replicate` reduces."""

    overlaps = True

    def __init__(self, managed: Managed) -> None:
        super().__init__(managed)
        settings = managed.settings
        # If all gradients are deferred to the end of the window and the wire needs means, gradients are
        # multiplied by 1/count before the communication. In all other cases the sum is multiplied by 1/count
        # afterwards.
        waits = all(
            unit.mode == "all" and (unit.narrows(settings.wire) or reduce_dtype(unit.module) is None)
            for unit in self.units
        )
        keys = {name: name for name, param in managed.named if param.requires_grad}
        numel_of = {id(param): unit.whole_numel(param) for unit in self.units for param in unit.params}
        numels = {name: numel_of[id(param)] for name, param in managed.named if param.requires_grad}
        self.residuals = Residuals([(self.wire.memory, keys)], settings.wire, numels)
        self._divisor_wire: Wire = settings.wire if waits else FP32()
        self._replay = Replay(managed.model)
        self._published = Published(self.names, self.params)
        self._nan = torch.full((), torch.nan, dtype=torch.float32, device=self.params[0].device)
        self._gave_up = False

    def open(self) -> None:
        super().open()
        self._gave_up = False

    def collect(self) -> None:
        self.unsharded.count_micro_batch()
        self.padding.end()

    def reduce(self, header: Header) -> None:
        """Reduce gradients by replaying the forward and backward of an earlier batch with zero gradients.

        The replay is needed because FSDP reduces gradients only inside a backward.
        """
        with self._reducing(header):
            pass

    @contextmanager
    def overlap(self, header: Header, roots: Sequence[Tensor]) -> Iterator[None]:
        del roots
        with self._reducing(header):
            yield
            self.unsharded.count_micro_batch()

    def give_up(self) -> None:
        """All-reduce the flags of used parameters if the reduction has begun.

        The remaining gradients are not reduced, because FSDP cannot resume a backward.
        """
        self._gave_up = True
        self.padding.end()
        for unit in self.units:
            unit.disable_reduction()
        if self._divisor is not None and self._used_flags is None:
            self._used_flags = self.used.all_reduce(self.unsharded.used)

    def finish(self, final: FinalPass) -> None:
        """Read and scale `.grad` in one pass, after FSDP has reduced the gradients."""
        if self._gave_up:
            final.void = self._nan
        if self._used_flags is not None:
            try:
                self._used_flags.drop_unused(self.params, waits=self._gave_up)
            except RuntimeError as error:
                if not self._gave_up:
                    raise
                raise RuntimeError(
                    "an exception has ended the window's last backward on this rank; FSDP cannot resume it, "
                    f"and other ranks wait in it: {error}"
                ) from error
        self._used_flags = None
        self._published.read(final, None if self._divisor is None else self._divisor.after_wire())

    def blame(self) -> Callable[[int], list[int] | None]:
        return self.unsharded.blame()

    def release(self, *, keeps_grad: bool) -> None:
        super().release(keeps_grad=keeps_grad)
        self._replay.release()

    @contextmanager
    def _reducing(self, header: Header) -> Iterator[None]:
        """Reduce gradients in the body's backward; if the body runs no backward, replay a backward."""
        self.wire.before = self.make_divisor(header, self._divisor_wire).before_wire
        self.wire.memory.begin(header.position[0])
        _log.debug("reduce %d units in the next backward", len(self.units))
        if not self._replay.has_batch and not self.unsharded.has_run:
            self._replay.run(self.padding.preserve_grads)  # raises the error of the replay
        for unit in self.units:
            unit.enable_reduction()
        self.unsharded.has_arrived = False
        with self.unsharded.one_grad_dtype():
            yield
            if not self.unsharded.has_arrived:
                with self.unsharded.zeroed():
                    self._replay.run(self.padding.preserve_grads)
            elif (late := self.unsharded.first_with_grad()) is not None:
                raise RuntimeError(
                    f"the gradient of {self.names[late]!r} was computed again after FSDP had reduced it, and "
                    "would be lost, because of reentrant checkpointing of a unit that a forward calls twice: "
                    "pass use_reentrant=False to torch.utils.checkpoint"
                )
        self.padding.end()
        self._check_complete(header)

    def _check_complete(self, header: Header) -> None:
        """Check that every gradient was reduced, and all-reduce the flags of used parameters."""
        for unit in self.units:
            unit.disable_reduction()
        left = [
            name
            for index, (name, param) in enumerate(zip(self.names, self.params, strict=True))
            if param.grad is None and not self.unsharded.is_missing(index)
        ]
        if left and not header.totals().invalid_counts:  # the error for invalid counts is more helpful
            raise RuntimeError(
                f"FSDP has not reduced the gradient of {left[0]!r} ({len(left)} parameters in all) in the "
                "window's last backward, which did not run through the model's own forward: call the model "
                "itself, not its submodules. (If a hook has removed the gradient, remove the hook)"
            )
        self._used_flags = self.used.all_reduce(self.unsharded.used)
        self.is_clean = True
