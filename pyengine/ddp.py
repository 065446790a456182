"""DDP's buckets under the engine: `attach` drives when DDP reduces, the hook says how.

Every forward runs as under `no_sync`. Right before the window's last backward the reducer is told to expect gradients;
after it, parameters that this backward did not touch are marked by a backward of zeros, which completes DDP's buckets
with what earlier micro-batches left in `.grad`. So no `find_unused_parameters`, and nothing depends on where forwards ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pyengine.accumulator.base import Saved, flagged_in, slot_gradient
from pyengine.ddp_sums import ExactBeside, Fp32Beside, Sums, packed
from pyengine.header import Header, LocalWindow
from pyengine.hook import HookState, Launched, Local, Mode, comm_hook
from pyengine.norm import FinalPass, PlainStepper, Stepper


class DDPReducer:
    """Gradients that DDP owns.

    Args:
        ddp: the wrapped model; without another communication hook.
        state: hook state; `attach` registers it.
        accumulator: "fp32" sums narrow gradients in fp32 buffers beside DDP's; "exact" sums all of them there, exactly;
            "native" leaves sums to autograd.
        terms: micro-batches of a full window, over all ranks.
    """

    overlaps = True
    stepper: Stepper = PlainStepper()

    def __init__(
        self, ddp: DistributedDataParallel, state: HookState, *, accumulator: str, terms: int
    ) -> None:
        named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
        self.names: Sequence[str] = [name for name, _ in named]
        self.params: Sequence[Parameter] = [p for _, p in named]
        self._name_of = {p: name for name, p in named}
        self._ddp, self._state = ddp, state
        self._one = torch.ones((), device=self.params[0].device)
        self._groups = _by_dtype(self.params)
        self._defers_count = not state.wire.folds_count and all(
            p.dtype == state.wire.dtype for p in self.params
        )
        self._sums: Sums | None = None
        self._needs_sums = accumulator == "exact"
        if self._needs_sums:
            self._sums = Sums(ddp, partial(ExactBeside, terms=terms), lambda dtype: True)
        elif accumulator == "fp32" and any(map(_is_narrow, {p.dtype for p in self.params})):
            self._sums = Sums(ddp, Fp32Beside, _is_narrow)
        self._needs_bootstrap = ddp.static_graph
        self._searched: Tensor | None = None
        self._reduction: _Reduction | None = None
        ddp.register_comm_hook(state, comm_hook)
        ddp.require_backward_grad_sync = False

    def local_window(self, terms: int | None) -> LocalWindow:
        """Return what a window's counts and losses are noted in."""
        return LocalWindow(terms)

    def open(self) -> None:
        """A window opens: its buffer broadcast is still to come."""
        self._buffers_due = bool(self._ddp.broadcast_buffers and self._ddp.modules_buffers)
        self._announced = False
        self._ddp.require_forward_param_sync = False

    def begin(self) -> None:
        """Start a window with gradients of zero."""
        for param in self.params:
            param.grad = None
        if self._sums is not None:
            self._sums.begin()

    def before_forward(self, *, syncs: bool) -> None:
        """Let buffers travel with the window's last forward only."""
        if syncs:
            self._announced = True
            self._ddp.require_forward_param_sync = True

    def before_header(self) -> None:
        """Catch up with the collectives of forwards that this rank did not run: every rank launches the same ones."""
        rebuilt = self._ddp.reducer._rebuild_buckets()
        if rebuilt and self._sums is not None:
            self._sums.lay_out()
        travelled = self._announced and not self._ddp.require_forward_param_sync
        if self._buffers_due and not travelled:
            self._ddp.require_forward_param_sync = True
            self._ddp._sync_buffers()
        self._buffers_due = False
        self._ddp.require_forward_param_sync = False

    def add(self, micro_batch: int, backward: Callable[[], None]) -> None:
        """Run an earlier backward as under no_sync, then take narrow gradients into the fp32 sums."""
        if self._needs_bootstrap:
            self._state.mode = Local()
            self._expect(None)
        backward()
        self._needs_bootstrap = False
        if self._sums is not None:
            self._sums.add()

    def reduce(self, header: Header, backward: Callable[[], None] | None, loss: Tensor | None) -> None:
        """Let DDP reduce its buckets, overlapped with `backward` if there is one."""
        self._needs_bootstrap = False
        if self._sums is not None and self._needs_sums:
            self._sums.follow()  # also where no earlier micro-batch has made them: every rank sums the same way
        mode = _Reduction(header, self._sums, defers_count=self._defers_count)
        self._state.mode = self._reduction = mode
        self._is_expecting = False
        self._recall(loss)
        if backward is None:
            self._reduce_all()
            return
        self._before = [_place(param) for param in self.params]
        self._expect(loss)
        backward()
        self._complete()

    def give_up(self, header: Header) -> None:
        """Complete DDP's buckets, voided, after a backward that failed."""
        del header
        if self._reduction is not None and not self._reduction.is_complete:
            self._reduction.poison = True
            if self._is_expecting:
                self._complete()
            else:  # DDP has not heard of this backward yet
                self._recall(None)
                self._reduce_all()

    def finish(self, header: Header, final: FinalPass) -> None:
        """Take norm and finite flags of what DDP has put into `.grad`; it has waited already."""
        self._state.mode = Local()
        self._reduction = None
        for group in self._groups:
            group.norm(self._one, final)
        if self._defers_count:
            final.multiply(header.inv_count())
        final.settle()

    def scale_(self, scale: Tensor) -> None:
        """Multiply `.grad` in place, one fused pass a dtype."""
        for group in self._groups:
            group.scale_(scale)

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells the micro-batches in which the fp32 sums met inf or nan; None: not watched."""
        flagged = [] if self._sums is None else self._sums.flagged()

        def blame(index: int) -> list[int] | None:
            for params, flags in flagged:
                for slot, param in enumerate(params):
                    if param is self.params[index]:
                        return flagged_in(flags, slot)
            return None

        return blame

    def save(self) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing for unused parameters."""
        left = {self._name_of[p]: slot_gradient(p) for p in self.params}
        saved = {name: {"sum": sum.clone().reshape(-1)} for name, sum in left.items() if sum is not None}
        return saved | ({} if self._sums is None else self._sums.save(self._name_of))

    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches."""
        summed: set[str] = set()
        if self._sums is not None:
            self._sums.load(saved, self._name_of, done=done)
            summed = {self._name_of[p] for params, _ in self._sums.flagged() for p in params}
        for param in self.params:
            name = self._name_of[param]
            if name in saved and name not in summed:
                param.grad = torch.empty_like(param)
                slot = param.grad.as_strided((param.numel(),), (1,), param.grad.storage_offset())
                slot.copy_(saved[name]["sum"])

    def refuses_load(self) -> list[str]:
        """Refuse what DDP would forget: that a parameter was used before."""
        if not self._searches:
            return []
        why = (
            "DDP with find_unused_parameters=True would not reduce what only earlier micro-batches have used"
        )
        return [f"states are of an open window, and {why}: make it without, which attach does not need"]

    def order(self) -> list[int]:
        """Return nothing: DDP has its own order of buckets."""
        return []

    def follow(self, order: list[int]) -> None:
        """Do nothing: DDP has its own order of buckets."""

    @property
    def _searches(self) -> bool:
        """Whether DDP looks for parameters that its backward will not reach."""
        return self._ddp.find_unused_parameters and not self._ddp.static_graph

    def _recall(self, loss: Tensor | None) -> None:
        """Give zeros to parameters that only earlier micro-batches used and have left in sums beside.

        DDP remembers that they were used, and wants a `.grad` to put the result into.
        """
        if self._sums is not None and self._searches:
            for param in self._sums.used - (set() if loss is None else _leaves(loss)):
                param.grad = torch.zeros_like(param)

    def _expect(self, loss: Tensor | None) -> None:
        reducer = self._ddp.reducer
        reducer.prepare_for_forward()
        self._searched = loss if self._searches else None
        reducer.prepare_for_backward([] if self._searched is None else [self._searched])
        self._is_expecting = True

    def _complete(self) -> None:
        """Mark the parameters that the backward did not touch, so that DDP's buckets complete."""
        assert self._reduction is not None
        if self._reduction.is_complete:
            return
        places = zip(self.params, self._before, strict=True)
        missing = [param for param, before in places if _place(param) == before]
        if self._searched is not None:
            # DDP itself has marked the others. (Only after a failed backward is anything missing here.)
            reached = _leaves(self._searched)
            missing = [param for param in missing if param in reached]
        if missing:
            _zeros(missing).backward()

    def _reduce_all(self) -> None:
        params = self.params
        if self._searches:
            params = [p for p in params if p.grad is not None] or params[:1]
        zero = _zeros(params)
        self._expect(zero)
        zero.backward()


class _Reduction(Mode):
    """The hook's part in one window: sums over ranks, the divisor from the header."""

    def __init__(self, header: Header, sums: Sums | None, *, defers_count: bool) -> None:
        self._header, self._sums, self._defers_count = header, sums, defers_count
        self.is_complete = False
        self.poison = False

    def before(self, one: Tensor) -> Tensor:
        del one
        return self._header.inv_count()

    def after(self, one: Tensor) -> Tensor | None:
        del one
        return None if self._defers_count else self._header.inv_count()

    def launch(self, bucket: Any, comm: Any) -> Launched | None:
        total = None if self._sums is None else self._sums.of(bucket)
        if not isinstance(total, ExactBeside):
            return None
        return total.launch(bucket.buffer(), comm, self.after, poison=self.poison)

    def fill(self, bucket: Any, flat: Tensor, scale: Tensor) -> bool:
        if self.poison:
            flat.fill_(float("nan"))
            return True
        total = None if self._sums is None else self._sums.of(bucket)
        return isinstance(total, Fp32Beside) and total.fill(bucket.buffer(), flat, scale)

    def seen(self, bucket: Any) -> None:
        self.is_complete = self.is_complete or bucket.is_last()


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize < torch.float32.itemsize


def _place(param: Parameter) -> tuple[int, int] | None:
    """Describe the state of a gradient, without keeping it alive: a backward changes its version or its place."""
    grad = param.grad
    return None if grad is None else (grad.data_ptr(), grad._version)


def _leaves(loss: Tensor) -> set[Tensor]:
    """Return the tensors that a backward from `loss` would give gradients to."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


class _Zeros(torch.autograd.Function):
    """Depends on every given parameter with a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.params = params
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.new_zeros(()).expand_as(p) for p in ctx.params)


def _zeros(params: Sequence[Parameter]) -> Tensor:
    zero: Tensor = _Zeros.apply(*params)  # type: ignore[no-untyped-call]
    return zero


class _Group:
    """The parameters of one dtype."""

    def __init__(self, params: Sequence[Parameter], indices: Sequence[int]) -> None:
        self._params = [params[index] for index in indices]
        device = self._params[0].device
        self._plan = packed([param.numel() for param in self._params])
        self._registration = torch.tensor(indices, device=device)
        self._sumsq = torch.zeros(len(indices), dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(len(indices), dtype=torch.uint8, device=device)

    def norm(self, one: Tensor, final: FinalPass) -> None:
        """Read the gradients once; leave their norm and finite flags in `final`."""
        grads = [slot_gradient(param) for param in self._params]
        self._plan.unscale_norm(grads, None, one, sumsq=self._sumsq, nonfinite=self._nonfinite.zero_())
        final.sumsq.index_copy_(0, self._registration, self._sumsq)
        final.nonfinite.index_copy_(0, self._registration, self._nonfinite)

    def scale_(self, scale: Tensor) -> None:
        """Multiply the gradients in place."""
        grads = [slot_gradient(param) for param in self._params]
        self._plan.unscale_norm(grads, grads, scale, sumsq=self._sumsq, nonfinite=self._nonfinite)


def _by_dtype(params: Sequence[Parameter]) -> list[_Group]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, param in enumerate(params):
        groups.setdefault(param.dtype, []).append(index)
    return [_Group(params, indices) for indices in groups.values()]
