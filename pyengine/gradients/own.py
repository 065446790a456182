"""Reduction of the engine's own buckets, from the arrival of gradients to the mean in `.grad`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pyengine.comm.base import Comm, Unbroken
from pyengine.gradients.arrival import Arrivals, Watch, may_nest, watching
from pyengine.gradients.base import Reducer, Residuals, Then, not_reduced
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.grad_record import GradRecord
from pyengine.gradients.layout import ParamSpec, backward_order, build
from pyengine.gradients.local_part import local_parts, release
from pyengine.gradients.norms import ReducedNorms
from pyengine.gradients.own_buckets import OwnBucket, own_bucket
from pyengine.gradients.settings import Settings
from pyengine.gradients.transfers import Transfers
from pyengine.gradients.used_anywhere import UsedAnywhere, UsedFlags
from pyengine.window.divisor import Divisor
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.wire.bucket_wire import WireMemory
from pyengine.wire.memory import BucketSlice

_log = logging.getLogger("pyengine.gradients")

# As in DDP, a small first bucket lets communication start early in the backward, even for a small model.
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Groups:
    """The transports of an engine: one over all of its ranks, and one per group of ranks."""

    world: Comm
    # The transport over the ranks of each group, indexed by `ParamSpec.group`. `world` also counts the
    # traffic of the groups.
    comms: Sequence[Comm]
    # Per parameter, whether this rank includes the parameter in the norm; None if all ranks hold the same
    # parameters.
    counted: Sequence[bool] | None = None
    # Whether all ranks have parameters with the same names in the same groups, so that the ranks can agree on
    # one bucket order.
    are_alike: bool = True


class BucketGradRecord(GradRecord):
    """A record of the gradients in buckets; each bucket keeps a separate record."""

    def __init__(self, buckets: Sequence[OwnBucket]) -> None:
        self._buckets = buckets

    def record(self) -> None:
        for bucket in self._buckets:
            bucket.record_grads()

    def changed(self) -> list[int]:
        return sorted(bucket.indices[slot] for bucket in self._buckets for slot in bucket.changed_grads())

    def replaced(self) -> list[int]:
        return sorted(bucket.indices[slot] for bucket in self._buckets for slot in bucket.replaced_grads())

    def follow_replaced(self) -> None:
        for bucket in self._buckets:
            bucket.follow_replaced_grads()


class BucketReducer(Reducer):
    """Reducer that keeps gradients in flat buckets that the engine owns.

    Every rank launches reductions in bucket order, regardless of which bucket is complete first, so that
    collectives always match. The first window uses the reverse of the registration order. Rank 0 records the
    order in which its gradients arrive, and all ranks lay out their buckets in that order before the second
    window. Frozen parameters are left unchanged.
    """

    overlaps = True

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        params: Sequence[Parameter],
        *,
        groups: Groups,
        settings: Settings,
        terms: Terms,
    ) -> None:
        self.params: Sequence[Parameter] = list(params)
        self.names: Sequence[str] = [spec.name for spec in specs]
        self._specs, self._settings, self._terms = list(specs), settings, terms
        self._wire, self._groups, self._comm = settings.wire, groups, groups.world
        self.counted = groups.counted
        # ---- bucket order ----
        # Whether any window has been reduced. The value becomes True in the same window on every rank.
        self._has_launched = False
        # The bucket order from the next window on: the order in which gradients arrived on rank 0, or the
        # order in a loaded state. None before the first reduction.
        self._agreed: list[int] | None = None
        # Whether the bucket order is final. With one rank, or if ranks have different parameters and cannot
        # agree on an order, the order is final from the start. Otherwise it is final from the second window
        # on.
        self._order_is_final = self._comm.world_size == 1 or not groups.are_alike
        # ---- arrival of gradients ----
        # The order of gradients in this rank's first backward; None before that backward.
        self._arrivals: Arrivals | None = None
        # Parameters whose gradient was accumulated more than once in a backward.
        self._repeated: set[int] = set()
        self._is_exact = settings.kind == "exact"
        self.observers = None if self._is_exact else []
        # ---- reduction ----
        self._memory = WireMemory()
        own = sorted({spec.group for spec in specs if spec.requires_grad})
        self._used = {group: UsedAnywhere(groups.comms[group], params[0].device) for group in own}
        self._used_flags: dict[int, UsedFlags] = {}
        trained = [spec for spec in specs if spec.requires_grad]
        keys = {spec.name: spec.name for spec in trained}
        numels = {spec.name: spec.numel for spec in trained}
        self.residuals = Residuals([(self._memory, keys)], self._wire, numels)
        self._lay_out(backward_order(specs))

    def _lay_out(self, order: Sequence[int]) -> None:
        # Free the old buffers before new buffers are allocated.
        self._local_params = local_parts(self.params)
        self._buckets: list[OwnBucket] = []
        self._transfers: Transfers[OwnBucket] | None = None
        self.layout = build(
            self._specs,
            order,
            cap_bytes=self._settings.cap_bytes,
            first_bytes=FIRST_BUCKET_BYTES,
        )
        _log.debug("lay out %d parameters in %d buckets", len(order), len(self.layout.buckets))
        for group, comm in enumerate(self._groups.comms):
            numels = [bucket.numel for bucket in self.layout.buckets if bucket.group == group]
            comm.reserve([numel * self._wire.dtype.itemsize for numel in numels])
        for spec in self.layout.buckets:
            mine = [self._local_params[slot.param] for slot in spec.slots]
            slots = zip(spec.slots, mine, strict=True)
            places = [BucketSlice(slot.name, slot.offset, slot.numel, part) for slot, part in slots]
            is_last = spec is self.layout.buckets[-1]
            wire = self._memory.wire_for(self._wire, places, spec.numel, mine[0].device, is_last=is_last)
            comm = self._groups.comms[spec.group]
            bucket = own_bucket(spec, mine, self._settings, wire=wire, terms=self._terms, comm=comm)
            bucket.observers = self.observers
            self._buckets.append(bucket)
        buckets = self._buckets
        plans = [(bucket.plan, bucket.indices) for bucket in buckets]
        self._norms = ReducedNorms(plans, self.params[0].device)
        self.grad_record = BucketGradRecord(buckets)
        # For each parameter's registration index, the index of its bucket. The entries are in bucket order.
        self._bucket_of = {index: bucket.spec.index for bucket in buckets for index in bucket.indices}

    def local_params(self) -> Sequence[Parameter]:
        return self._local_params

    def groups_of_params(self) -> tuple[Sequence[Comm], Sequence[int]]:
        return self._groups.comms, [spec.group for spec in self._specs]

    def buckets(self) -> Sequence[OwnBucket]:
        return self._buckets

    def begin(self) -> None:
        if self._agreed is not None and not self._order_is_final:
            self.lay_out_as(self._agreed)
        super().begin()

    def add(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside the body if possible, while they are in the cache."""
        watches = [watch for bucket in self._accumulated_in_backward() for watch in bucket.watches()]
        return self._add(watches) if watches or self._arrivals is None else Then(self.collect)

    @contextmanager
    def _add(self, watches: Sequence[Watch]) -> Iterator[None]:
        with self._record_arrivals_once(), watching(watches):
            yield
        self.collect()

    def leave_in_grad(self) -> AbstractContextManager[None]:
        return self._record_arrivals_once()

    def _accumulated_in_backward(self) -> list[OwnBucket]:
        """Return the buckets that can be accumulated inside the backward of any micro-batch before the last.

        An exact sum has room for one term per micro-batch. Therefore an exact bucket is accumulated inside
        the backward only if each gradient is known to arrive once.
        """
        if not self._is_exact:
            return self._buckets
        if self._arrivals is None:
            return []
        repeated = {self._bucket_of[param] for param in self._repeated}
        return [bucket for index, bucket in enumerate(self._buckets) if index not in repeated]

    def is_used(self, index: int) -> bool:
        if index not in self._bucket_of:
            return False  # the parameter was frozen when the engine was created
        bucket = self._buckets[self._bucket_of[index]]
        return bucket.is_used(bucket.indices.index(index))

    def has_used_all(self) -> bool:
        return all(all(bucket.used) for bucket in self._buckets)

    def reduce(self, header: Header) -> None:
        self.prepare(header)
        self.launch_rest()

    @contextmanager
    def overlap(self, header: Header, roots: Sequence[Tensor]) -> Iterator[None]:
        # Buckets that wait for the end of the backward, because a gradient may be accumulated again.
        waiting = {self._bucket_of[param] for param in self._repeated}
        if self._arrivals is None and (not roots or any(map(may_nest, roots))):
            # It is not yet known whether a gradient arrives more than once.
            waiting = set(range(len(self._buckets)))
        transfers = self.prepare(header)
        for bucket in self._buckets:
            bucket.arm()
        watches = [
            Watch(transfer.bucket.params, transfer.bucket.has_arrived, partial(transfers.complete, transfer))
            for index, transfer in enumerate(transfers.all)
            if index not in waiting
        ]
        with self._record_arrivals_once(), watching(watches):
            yield
        self._raise_if_late(transfers)
        self.launch_rest()

    def give_up(self) -> None:
        self.launch_rest(poison=True)

    def finish(self, final: FinalPass) -> None:
        transfers = self._transfers
        if transfers is None:
            raise not_reduced(" after some buckets had been reduced")
        # Wait for the header; the wait raises an error if collectives after the header cannot complete.
        transfers.header.vector()
        self._transfers = None
        self._norms.begin()
        for bucket in transfers.wait_in_order():
            bucket.from_wire(self._divisor.after_wire(), self._norms)
        self._norms.copy_to(final)
        final.leave_out(self._drop_unused())

    # ---- windows that run as a CUDA graph; see engine/captured_windows.py ----

    @property
    def capture_problems(self) -> list[str]:
        """Reasons why a window of these gradients cannot be captured as a graph; may be empty."""
        comm, problems = self._comm, []
        if not comm.is_stream_ordered and (comm.world_size > 1 or comm.backend):
            backend = comm.backend or type(comm).__name__
            problems.append(f"the host waits for collectives over {backend}: use NCCL, or a single rank")
        if self.observers:
            problems.append("an observer of this rank's own sums is called by the host in every window")
        return problems

    def run_again(self) -> None:
        """After each replay, launch the collectives that are not part of the window's graph."""
        for group, used in self._used.items():
            if used.on_hosts:  # ranks that run this window without a graph wait for these flags
                used.all_reduce([each for bucket in self._buckets_of(group) for each in bucket.used])

    def release(self, *, keeps_grad: bool) -> None:
        self._free_buckets(keeps_grad=keeps_grad)

    def _free_buckets(self, *, keeps_grad: bool) -> None:
        self._drop_transfers()
        release(self._local_params)
        self._buckets.clear()  # in place, because `grad_record` shares the list
        for param in map(self.params.__getitem__, self._bucket_of):
            param.grad = param.grad.clone() if keeps_grad and param.grad is not None else None

    def order(self) -> list[int]:
        return self._agreed or []

    def lay_out_as(self, order: list[int]) -> None:
        self._agreed, self._order_is_final = order, True
        expected, seen = backward_order(self._specs), set(order)
        order = [*order, *(index for index in expected if index not in seen)]
        if order != [*self._bucket_of]:
            # Free the views of the old buffers before new buffers are allocated.
            self._free_buckets(keeps_grad=False)
            self._lay_out(order)

    def prepare(self, header: Header) -> Transfers[OwnBucket]:
        """Prepare the reductions of a window, before `launch_rest`."""
        self._drop_transfers()  # transfers may remain from a window that has failed
        self._used_flags = {}
        self._divisor = Divisor(header.inv_count, self._wire, header.inv_scale)
        self._memory.begin(header.position[0])
        groups = self._groups
        sent = [(bucket, groups.comms[bucket.spec.group]) for bucket in self._buckets]
        self._transfers = Transfers(sent, header, self._divisor, are_alike=groups.are_alike)
        return self._transfers

    def _drop_transfers(self) -> None:
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.drop()

    def launch_rest(self, *, poison: bool = False) -> None:
        """Launch the buckets that the backward has not launched, and all-reduce the flags of used parameters.

        After this call, either all ranks have reduced their first window or no rank has.
        """
        if self._transfers is None:
            return
        self._transfers.launch_rest(poison=poison)
        header = self._transfers.header
        if header.is_refused():
            return
        with Unbroken(self._comm):
            self._launch_used_flags(header, poison=poison)
            if not self._has_launched and not self._order_is_final:
                # After the collectives of the buckets, all ranks are at the same point in this engine.
                seen = backward_order(self._specs) if self._arrivals is None else self._arrivals.order
                self._agreed = self._comm.all_gather_object(seen)[0]
            self._has_launched = True

    def _launch_used_flags(self, header: Header, *, poison: bool) -> None:
        for group, used in self._used.items():
            if group not in self._used_flags:
                # A rank that sends nan reports every parameter as used, so that other ranks do not discard
                # the nan.
                mine = [each or poison for bucket in self._buckets_of(group) for each in bucket.used]
                self._used_flags[group] = used.all_reduce(mine, are_all=header.all_used())

    def _buckets_of(self, group: int) -> list[OwnBucket]:
        return [bucket for bucket in self._buckets if bucket.spec.group == group]

    def _drop_unused(self) -> list[int]:
        """Set `.grad` of unused parameters to None, and return their indices."""
        dropped = []
        for group, flags in self._used_flags.items():
            buckets = self._buckets_of(group)
            indices = [index for bucket in buckets for index in bucket.indices]
            params = [param for bucket in buckets for param in bucket.params]
            dropped += [indices[place] for place in flags.drop_unused(params)]
        return dropped

    def _raise_if_late(self, transfers: Transfers[OwnBucket]) -> None:
        """Raise an error if a bucket changed after its launch; later windows launch it after the backward."""
        complete = [transfer.bucket for transfer in transfers.all if transfer.is_complete]
        late = {bucket.indices[slot] for bucket in complete for slot in bucket.late()}
        if late:
            names = ", ".join(repr(self.names[param]) for param in sorted(late)[:5])
            if all(self.params[param].grad is None for param in late):
                raise RuntimeError(
                    f"the gradient of {names} was set to None inside the backward (by an optimizer in a "
                    "hook, or by .grad = None), when its bucket may already have been launched: remove this "
                    "code, and call sync.step(optimizer). This rank cannot use the window: call "
                    "sync.abandon() on every rank and continue"
                )
            self._repeated |= late
            if _is_reduced_by_ddp([self.params[param] for param in late]):
                raise RuntimeError(
                    "call the model itself, or make the engine with pe.attach(ddp_model): a "
                    "DistributedDataParallel around the model also reduces the gradient of "
                    f"{names} in the backward. This rank cannot use the window: call sync.abandon() on every "
                    "rank"
                )
            raise RuntimeError(
                f"the gradient of {names} was accumulated again after its bucket may have been launched: a "
                "backward ran inside the backward (reentrant checkpointing, a hook, a custom Function), "
                "unlike in earlier backwards. This rank cannot use the window: call sync.abandon() "
                "on every rank and continue; from now on these buckets wait for the end of the backward. "
                "(A rank on which this did not happen may have stepped; the next window reports this)"
            )

    def _record_arrivals_once(self) -> AbstractContextManager[None]:
        """Record the order in which gradients arrive in this rank's first backward."""
        return self._record_arrivals() if self._arrivals is None else nullcontext()

    @contextmanager
    def _record_arrivals(self) -> Iterator[None]:
        arrivals = Arrivals({index: self.params[index] for index in backward_order(self._specs)})
        with arrivals.recorded():
            yield
        self._arrivals = arrivals  # not set if the backward fails
        self._repeated |= arrivals.repeated


def _is_reduced_by_ddp(params: Sequence[Parameter]) -> bool:
    """Whether a DDP that still reduces gradients has any of the parameters; the search takes milliseconds."""
    mine = set(map(id, params))
    # Compare types: `isinstance` reads the class from the object, which fails for dead weak proxies.
    ddps: Iterator[Any] = (e for e in gc.get_objects() if issubclass(type(e), DistributedDataParallel))
    return any(
        ddp.require_backward_grad_sync and not mine.isdisjoint(map(id, ddp.parameters())) for ddp in ddps
    )
