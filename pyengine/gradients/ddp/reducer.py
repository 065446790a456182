"""DDP's buckets under the engine: `attach` decides when DDP reduces, the hook how.

Every forward runs as under `no_sync`. Right before the window's last backward DDP's reducer is prepared for a
backward. After it, parameters that this backward did not reach are marked as ready, with the gradients of
earlier micro-batches in `.grad`, which completes DDP's buckets. So `find_unused_parameters` is not needed,
and it does not matter where forwards ran.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm.base import Comm
from pyengine.comm.watch import Promise
from pyengine.gradients.arrival import Watch, watching
from pyengine.gradients.base import Reducer, Residuals, not_reduced, problems_of_capture
from pyengine.gradients.bucket import Accumulator
from pyengine.gradients.ddp.bucket_norms import BucketNorms
from pyengine.gradients.ddp.buckets import DDPBuckets, ExactDDPBucket, Fp32DDPBucket, GradSums
from pyengine.gradients.ddp.hook import (
    BucketSum,
    HookState,
    Launched,
    comm_hook,
    completed,
    skip_reduction,
)
from pyengine.gradients.ddp.private import (
    OnlyDDP,
    ReducerDriver,
    publish,
    reduced_parameters,
    slots_of,
    zero_buckets,
)
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.marks import GradVersions
from pyengine.gradients.published import Published
from pyengine.gradients.settings import Settings, sum_dtype
from pyengine.gradients.slots import Saved
from pyengine.gradients.used_anywhere import UsedAnywhere, UsedFlags
from pyengine.ops.capture import report as report_uncapturable
from pyengine.ops.capture import section
from pyengine.ops.device import current_stream, is_on_default_stream, runs_ahead
from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header

_log = logging.getLogger("pyengine.gradients")


class Reduction:
    """The sums over ranks of one window's buckets; none after a header in which ranks disagree."""

    def __init__(self, owner: DDPReducer, header: Header) -> None:
        self.owner, self.header = owner, header
        self.divisor = Divisor(header.inv_count, owner.state.wire, header.inv_scale)
        owner.norms.begin()
        self._stream = current_stream(owner.params[0].device)
        # Whether a bucket that DDP hands out before the header has arrived may wait for a later bucket, so
        # that the backward does not wait. Only where DDP is sure to hand out its last bucket.
        self.may_delay = False
        self.is_complete = False  # whether DDP has handed out every bucket
        self.poison = False  # whether buckets from now on are filled with nan, which voids the window
        self._delayed: list[tuple[Any, Promise]] = []
        # Exceptions of failed collectives. The state of the other ranks is unknown after one.
        self.failures: list[BaseException] = []
        # Buckets that DDP has handed out, launched or waiting for the header, with their futures.
        self.under_way: list[tuple[Any, Any]] = []
        # Parameters that had no `.grad` when DDP handed their bucket out.
        self.without_grad: list[Any] = []
        # Parameters with a gradient of earlier micro-batches in `.grad` before the last backward.
        self.earlier: list[Any] = []
        # The all-reduce of used flags; None before it was launched.
        self.used: UsedFlags | None = None

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Launch the sum of a bucket, and of those delayed before it; after the last, the used flags."""
        self.without_grad += [param for param in bucket.parameters() if param.grad is None]
        self.owner.in_grad.check_last(bucket)
        flat = bucket.buffer()
        if section() is not None and current_stream(flat.device) != self._stream:
            report_uncapturable(f"DDP was made on another stream than windows run on: {_ON_ONE_STREAM}")
        # [Note: order of collectives in a window] in engine/engine.py: no bucket before the header.
        if self.may_delay and not (bucket.is_last() or runs_ahead(flat.device) or self.header.is_ready()):
            promise = Promise()
            self._delayed.append((bucket, promise))
            # DDP raises the error of a future only where it made the future itself, by `then`.
            future = self.owner.state.callbacks.call_back(promise.future, Future.value)
        else:
            self.launch_delayed()
            future = self._exchange(bucket)
        self.under_way.append((bucket, future))
        self.is_complete = self.is_complete or bucket.is_last()
        if self.is_complete:
            self.owner.launch_used_flags(self)
        return future

    def launch_delayed(self) -> None:
        """Launch the sums of delayed buckets, in their order."""
        while self._delayed:
            bucket, promise = self._delayed[0]
            future = self._exchange(bucket)
            del self._delayed[0]  # not before: a bucket that fails is tried again, and fails again
            self.owner.state.callbacks.call_back(future, promise.keep)

    def _exchange(self, bucket: Any) -> Future[Tensor]:
        if self.header.is_refused():
            return completed(bucket.buffer())
        return _SumInWindow(self, bucket).start()


class _SumInWindow(BucketSum):
    """The sum of a bucket, with those of earlier micro-batches, in a window."""

    def __init__(self, reduction: Reduction, bucket: Any) -> None:
        owner = reduction.owner
        super().__init__(owner.state, bucket, reduction.divisor)
        self.failures, self._reduction, self._owner = reduction.failures, reduction, owner
        self._total = owner.ddp_buckets.of(bucket)

    def fill(self, sent: Tensor, scale: Tensor) -> bool:
        if self._reduction.poison:
            sent.fill_(torch.nan)
            return True
        return isinstance(self._total, Fp32DDPBucket) and self._total.fill(self.bucket.buffer(), sent, scale)

    def observe(self, sent: Tensor, scale: Tensor | None) -> None:
        params = self.bucket.parameters()
        for observe in self._owner.observers or ():
            indices = [self._owner.index[param] for param in params]
            observe(indices, sent.split([param.numel() for param in params]), scale)

    def launch(self, comm: Comm) -> Launched:
        reduction, bucket, total = self._reduction, self.bucket, self._total
        _log.debug("launch DDP's bucket %d%s", bucket.index(), ", with nan" if reduction.poison else "")
        self.norms = self._owner.norms.of(bucket)
        if isinstance(total, ExactDDPBucket):
            poison, after = reduction.poison, self.divisor.after_wire
            launched = total.launch(bucket.buffer(), after, self.norms, poison=poison)
        else:
            launched = super().launch(comm)
        if bucket.is_last() and not comm.is_stream_ordered:
            self._owner.launch_used_flags(reduction)  # before `start` waits for the bucket
        return launched


class DDPReducer(Reducer):
    """Gradients that DDP owns.

    Accumulator "fp32" sums narrow gradients in our own fp32 buffers, 4 bytes an element more than DDP's;
    "exact" sums all gradients there, exactly, in 8.02; "native" leaves sums to autograd.
    """

    overlaps = True
    # As torch asks for DDP: by then it has rebuilt its buckets, and has timed its first ten backwards, by
    # events that it reads later. It could not read those that a capture has recorded.
    min_warm_up = 11

    def __init__(
        self,
        ddp: DistributedDataParallel,
        state: HookState,
        *,
        settings: Settings,
        terms: Terms,
    ) -> None:
        # ---- parameters ----
        named = reduced_parameters(ddp)
        self.names: Sequence[str] = [name for name, _ in named]
        self.params: Sequence[Parameter] = [p for _, p in named]
        self._ddp, self.state = ddp, state
        keys = {name: p for name, p in named}
        self.residuals = Residuals([(state.memory, keys)], state.wire)
        self._device = device = self.params[0].device
        self._comm = state.comm(device)
        self.index = index = {p: i for i, p in enumerate(self.params)}
        self.norms = BucketNorms(index, device)
        self._lay_out_norms()
        self._published = Published(self.names, self.params)
        self._before_backward = GradVersions(self.params)
        # ---- sums of earlier micro-batches: in buckets of ours, or in `.grad` ----
        self._is_exact = settings.kind == "exact"
        self.observers = None if self._is_exact else []
        summed = {
            p.dtype
            for p in self.params
            if self._is_exact or settings.drops or sum_dtype(settings.kind, p.dtype) != p.dtype
        }
        make = partial(ExactDDPBucket, terms=terms, comm=self._comm) if self._is_exact else Fp32DDPBucket
        self.ddp_buckets = DDPBuckets(ddp, make, index, summed)
        rest = [p for p in self.params if p.dtype not in summed]
        indices = [index[p] for p in rest]
        self.in_grad = GradSums(rest, indices, device, watch=settings.raises)
        # DDP itself finds unused parameters with find_unused_parameters, but it does not know the sums in our
        # buckets.
        self._shares_used = bool(summed) or ddp.static_graph or not ddp.find_unused_parameters
        self._used = UsedAnywhere(self._comm, device)
        # The used flags of the last window that was launched, by parameter.
        self._used_flags: list[bool] = []
        # The window's reductions, from the last backward until `finish`.
        self._reduction: Reduction | None = None
        # Whether sums move into DDP's buckets in one call. On an accelerator each of DDP's own copies is a
        # launch; on the host it reads from the cache what autograd has just added up, and one call would not.
        self._moves_sums = runs_ahead(device)
        # Slices of DDP's buckets of parameters summed in `.grad`; none where `.grad` is other memory.
        self._slices: list[tuple[Parameter, Tensor]] = []
        # ---- DDP, whose own synchronization is switched off ----
        if all(other is not state for _, other in ddp._comm_hooks):
            ddp.register_comm_hook(state, comm_hook)
        self._was_rebuilt = ddp._has_rebuilt_buckets
        self._ddp_flags = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = False
        self._driver = ReducerDriver(ddp, state, self.params)
        self._only = ddp.module.register_forward_pre_hook(OnlyDDP(ddp))

    @property
    def has_replaced_grad(self) -> bool:
        return self._ddp.gradient_as_bucket_view and self._ddp._has_rebuilt_buckets != self._was_rebuilt

    def groups_of_params(self) -> tuple[Sequence[Comm], Sequence[int]]:
        return [self._comm], [0] * len(self.params)

    def buckets(self) -> Sequence[Accumulator]:
        return [self.in_grad, *self.ddp_buckets]

    def open(self) -> None:
        """Open a window, whose buffer broadcast has not run yet."""
        if self._ddp._join_config.enable:
            raise RuntimeError(
                "ddp_model.join() around a loop over windows, which already handle ranks without data: leave "
                "join out; a rank that has run out of data sends zeros"
            )
        if self._reduction is not None or self._driver.finds_unused:
            # The last window was dropped before `finish`. Or before it was launched: DDP has noted which
            # parameters its backwards have used.
            self._driver.reset()
            self.state.reduce = skip_reduction
            self._reduction = None
        self._buffers_due = bool(self._ddp.broadcast_buffers and self._ddp.modules_buffers)
        self._syncs_announced = False
        self._ddp.require_forward_param_sync = False

    def begin(self) -> None:
        for param in self.params:
            param.grad = None
        super().begin()

    def before_forward(self, *, syncs: bool) -> None:
        """Let DDP broadcast buffers in the window's last forward only."""
        if syncs:
            self._syncs_announced = True
            self._ddp.require_forward_param_sync = True

    def before_retried_forward(self) -> None:
        """Rebuild DDP's buckets now; leave the broadcast of buffers to `before_header`."""
        self._rebuild_buckets()
        if self._ddp.require_forward_param_sync:  # announced, and no forward has launched it
            self._syncs_announced = self._ddp.require_forward_param_sync = False

    def has_used_all(self) -> bool:
        # Our buckets are made with the first gradient that comes into them.
        summed = self.ddp_buckets.used
        return all(param.grad is not None or param in summed for param in self.params)

    def before_header(self) -> None:
        """Launch DDP's collectives of forwards that this rank did not run.

        Every rank launches the same ones: the rebuild of buckets and the broadcast of buffers.
        """
        self._rebuild_buckets()
        if self._norms_rebuilt != self._ddp._has_rebuilt_buckets:  # rebuilt here, or in a forward of DDP
            self._lay_out_norms()
        was_broadcast = self._syncs_announced and not self._ddp.require_forward_param_sync
        if self._buffers_due and not was_broadcast:
            self._ddp.require_forward_param_sync = True
            self._ddp._sync_buffers()
        self._buffers_due = False
        self._ddp.require_forward_param_sync = False

    def _rebuild_buckets(self) -> None:
        if self._driver.rebuild_buckets():
            self.ddp_buckets.match_buckets()

    @contextmanager
    def add(self) -> Iterator[None]:
        """Run the body as under `no_sync`, and accumulate its gradients."""
        # While DDP learns a static graph it reads `.grad` itself, so no watch may empty it.
        watches: list[Watch] = []
        if self._driver.is_ready:
            self.ddp_buckets.match_buckets()
            watches = [watch for bucket in self.ddp_buckets for watch in bucket.watches()]
        with self._driver.learning_graph(), watching(watches):
            yield
        self.collect()

    def leave_in_grad(self) -> AbstractContextManager[None]:
        return self._driver.learning_graph()

    def collect(self) -> None:
        self.ddp_buckets.match_buckets()
        super().collect()

    def reduce(self, header: Header) -> None:
        self._reduce_all(self._prepare(header))

    @contextmanager
    def overlap(self, header: Header, roots: Sequence[Tensor]) -> Iterator[None]:
        reduction = self._prepare(header)
        if not self._driver.is_ready or (self._driver.finds_unused and not roots):
            with self._driver.learning_graph():
                yield
            self._reduce_all(reduction)
            return
        self._move_sums()
        self._before_backward.record()
        reduction.may_delay = True
        self._driver.prepare_for_backward(roots)
        try:
            yield
        except RuntimeError as error:
            if reduction.failures:  # DDP raises the text of it, in an error of its own
                raise reduction.failures[0] from error
            raise
        if not reduction.is_complete:
            arrived = set(self._before_backward.changed())
            self._driver.mark_unreached([p for index, p in enumerate(self.params) if index not in arrived])
        self._check_complete(reduction)

    def _move_sums(self) -> None:
        """Copy sums from `.grad` into DDP's buckets, and accumulate there: DDP would copy them one by one."""
        if self._driver.finds_unused:
            return
        moved = [
            (param, param.grad, into)
            for param, into in self._slices
            if param.grad is not None and not param.grad.is_sparse
        ]
        if moved:
            torch._foreach_copy_([into for _, _, into in moved], [grad for _, grad, _ in moved])
        for param, _, into in moved:
            param.grad = into

    def _keep_slices(self, reduction: Reduction) -> None:
        """Keep the slices of the buckets that DDP has handed out, once it has rebuilt them."""
        ddp = self._ddp
        is_final = ddp.gradient_as_bucket_view and ddp._has_rebuilt_buckets
        if self._slices or not self.in_grad.params or not is_final or not self._moves_sums:
            return
        here = set(self.in_grad.params)
        pairs = [pair for bucket, _ in reduction.under_way for pair in slots_of(bucket)]
        self._slices = [(param, into) for param, into in pairs if param in here]

    def _reduce_all(self, reduction: Reduction) -> None:
        """Reduce the gradients in `.grad`, without a backward."""
        self._driver.reduce_all()
        reduction.is_complete = reduction.is_complete or not self._driver.is_ready
        self._check_complete(reduction)

    def _prepare(self, header: Header) -> Reduction:
        """Make the hook reduce the buckets that DDP hands out from now on."""
        if self._is_exact or any(self.ddp_buckets):
            # Exact sums also without an earlier micro-batch: every rank has to reduce the same way. Others
            # where the last forward has rebuilt DDP's buckets: earlier ones may have gone past DDP.
            self.ddp_buckets.match_buckets()
        self.state.memory.begin(header.position[0])
        reduction = Reduction(self, header)
        if self._shares_used and self._driver.finds_unused:
            # Reset DDP's map of used parameters: those that earlier micro-batches have used have no `.grad`,
            # which DDP would expect.
            self._driver.reset()
            reduction.earlier = [param for param in self.params if param.grad is not None]
        self._reduction = reduction
        self.state.reduce = reduction.reduce
        return reduction

    def _check_complete(self, reduction: Reduction) -> None:
        """Check that DDP has handed out every bucket; launch the used flags."""
        if not reduction.is_complete:
            raise RuntimeError(
                "DDP has not reduced the gradients of this backward, which did not run through its hooks "
                "(for example under compiled autograd: use pe.GradSync on the bare model; or after a "
                "parametrization such as spectral_norm: register it before DDP is made), or under "
                "static_graph=True reached other parameters than the first one did"
            )
        self.launch_used_flags(reduction)

    def give_up(self) -> None:
        """Launch the remaining buckets with nan; `finish` raises an error of this call."""
        reduction = self._reduction
        if reduction is None or reduction.failures:
            return
        reduction.poison = True
        try:
            self._reduce_rest(reduction)
            self.launch_used_flags(reduction)
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            reduction.failures.append(error)

    def finish(self, final: FinalPass) -> None:
        """Copy the norms of the reduced buckets: DDP has waited and written `.grad`."""
        reduction = self._reduction
        self.state.reduce = skip_reduction
        if reduction is None:
            raise not_reduced(" or was not launched")
        if reduction.failures:
            raise not_reduced(f" ({reduction.failures[0]})") from reduction.failures[0]
        if reduction.used is not None and self._shares_used:
            missing = [*reduction.without_grad, *reduction.earlier]
            for bucket, _ in reduction.under_way:
                publish(
                    bucket, missing if self._driver.finds_unused else self._driver.without_published_grad()
                )
            # Set `.grad` to None where no rank has used a parameter.
            reduction.used.drop_unused(self.params)
        self._keep_slices(reduction)
        if not self.norms.copy_if_complete(final):
            self._published.read(final)
        if reduction.without_grad:
            final.leave_out([index for index, param in enumerate(self.params) if param.grad is None])
        self._was_rebuilt = self._ddp._has_rebuilt_buckets
        self._reduction = None
        self.state.callbacks.await_threads()

    @property
    def capture_problems(self) -> list[str]:
        problems = problems_of_capture(self._comm, self.observers)
        if self._driver.finds_unused:
            problems.append(
                "DDP with find_unused_parameters=True has the host look for them in every window: need "
                "static_graph=True, or neither"
            )
        if is_on_default_stream(self._device):
            problems.append(f"the default stream of a device cannot be captured: {_ON_ONE_STREAM}")
        return problems

    def before_capture(self) -> None:
        self._driver.stop_timing()

    def run_again(self) -> None:
        self._buffers_due = self._ddp.require_forward_param_sync = False  # the graph has broadcast them
        if self._used.on_hosts:  # ranks that run this window without a graph wait for these
            self._used.all_reduce(self._used_flags)

    def rewind(self) -> None:
        was_announced = self._syncs_announced
        self.open()
        if was_announced:
            self.before_forward(syncs=True)

    def load(self, saved: Saved, *, done: int) -> None:
        self.ddp_buckets.match_buckets()
        super().load(saved, done=done)

    def load_problems(self) -> list[str]:
        """Refuse where DDP would drop parameters that only earlier micro-batches have used."""
        if not self._driver.finds_unused:
            return []
        why = (
            "DDP with find_unused_parameters=True would not reduce what only earlier micro-batches have used"
        )
        return [f"the state is of an open window, and {why}: leave it out; attach does not need it"]

    def release(self, *, keeps_grad: bool) -> None:
        """Restore DDP: it reduces in every backward, as the fp32 mean over ranks. The hook stays."""
        if self._reduction is not None and not self._reduction.failures:
            self._driver.reset()
        self.ddp_buckets.clear()
        self._reduction, self._slices = None, []
        if not keeps_grad:
            for param in self.params:
                param.grad = None
        self.state.release()
        self._driver.release()
        self._only.remove()
        self._ddp.require_backward_grad_sync, self._ddp.require_forward_param_sync = self._ddp_flags

    def _lay_out_norms(self) -> None:
        self._norms_rebuilt = self._ddp._has_rebuilt_buckets
        self.norms.lay_out(partial(zero_buckets, self._ddp))

    def _reduce_rest(self, reduction: Reduction) -> None:
        """Reduce the buckets that DDP has not handed out; reset DDP."""
        reduction.may_delay = False
        reduction.launch_delayed()
        sent, is_complete = list(reduction.under_way), reduction.is_complete
        if not is_complete:
            self._driver.reduce_past_ddp(len(sent))
        for bucket, future in sent:
            future.wait()
            publish(bucket, bucket.parameters())
        if not is_complete:
            self._driver.all_reduce_used_map()
        self._driver.reset()

    def launch_used_flags(self, reduction: Reduction) -> None:
        """Launch the all-reduce of this rank's used flags."""
        # Hosts exchange flags in every window of every engine: a window of another engine then finds the same
        # collectives on every rank.
        exchanges = self._shares_used or self._used.on_hosts
        if not exchanges or reduction.used is not None or reduction.header.is_refused():
            return
        used = self.ddp_buckets.used
        # A poisoned rank reports every parameter as used, so that its nan is not dropped.
        without = [] if reduction.poison else reduction.without_grad
        unused = {id(param) for param in without if param not in used}
        self._used_flags = [id(param) not in unused for param in self.params]
        reduction.used = self._used.all_reduce(self._used_flags, are_all=reduction.header.all_used())


# DDP holds the nodes that accumulate gradients, and so the stream on which it was made.
_ON_ONE_STREAM = "make DDP and engine, and run windows, inside one `with torch.Stream(device):`"
