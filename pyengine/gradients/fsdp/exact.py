"""Exact sums of sharded parameters, with the same bits as under DDP or `GradSync`, on any mesh.

Because FSDP unshards parameters, the gradient of a micro-batch has the same bits as without FSDP. Gradients
are summed unsharded, the sums of all ranks are added, and each rank keeps its shard of the result. Norms and
flags are computed from the unsharded result, so they do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Unbroken, Work
from pyengine.gradients.base import not_reduced
from pyengine.gradients.bucket import aligned
from pyengine.gradients.exact_sums import Terms, exact_over_ranks
from pyengine.gradients.fsdp.places import is_first_on_mesh, shard_of
from pyengine.gradients.fsdp.reducer import Managed, ShardedReducer
from pyengine.gradients.norms import ReducedNorms
from pyengine.gradients.slots import as_gradient, slots_of
from pyengine.gradients.transfers import SendableBucket, Transfers
from pyengine.ops.device import send
from pyengine.ops.exact_reference import BLOCK
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.wire import FP32


class UnitBucket(SendableBucket):
    """The exact sum of the gradients of one FSDP2 unit, unsharded.

    The sum takes 8.02 bytes per element on every rank, and 2 bytes more for bf16 and fp16 parameters.
    """

    def __init__(
        self, params: Sequence[Parameter], indices: Sequence[int], *, terms: Terms, comm: Comm
    ) -> None:
        plan, device = aligned([param.numel() for param in params], BLOCK), params[0].device
        self._exact = exact_over_ranks(plan, terms=terms, device=device, comm=comm)
        super().__init__(params, indices, plan, self._exact)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        flat = self._exact.rounded
        if params[0].dtype != torch.float32:
            flat = torch.empty(flat.numel(), dtype=params[0].dtype, device=device)
        is_cast = flat is not self._exact.rounded
        self._rounded = slots_of(self._exact.rounded, plan)
        self._slots = slots_of(flat, plan) if is_cast else self._rounded
        self.num_bytes = sum(t.nbytes for t in self._exact.round_tensors()) + flat.nbytes * is_cast

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        del inv_count, comm  # `finish` divides the rounded sum, and the sum has its own transport
        if self.is_empty:
            self.deposit([None] * len(self.params))
        return self._exact.rounds(poison=poison)

    def publish(self, scale: Tensor | None, norms: ReducedNorms, place: int) -> None:
        """Scale the rounded sums and compute their norms; set each `.grad` to this rank's shard."""
        norms.read(place, self._rounded, self._slots, self._one if scale is None else scale)
        for param, slot in zip(self.params, self._slots, strict=True):
            param.grad = as_gradient(shard_of(slot.view(param.shape), param), param)


class ExactFSDPReducer(ShardedReducer):
    """Gradients of a sharded model, summed exactly; the reductions do not overlap with a backward."""

    def __init__(self, managed: Managed, *, terms: Terms) -> None:
        super().__init__(managed)
        index = {id(param): i for i, param in enumerate(self.params)}
        self._buckets = [
            UnitBucket(unit.params, [index[id(param)] for param in unit.params], terms=terms, comm=self.comm)
            for unit in managed.units
            if any(param.requires_grad for param in unit.params)
        ]
        plans = [(bucket.plan, bucket.indices) for bucket in self._buckets]
        self._norms = ReducedNorms(plans, self.params[0].device)
        self.held_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        self._reports_norm = send(
            [is_first_on_mesh(param) for param in self.params], torch.bool, self.params[0].device
        )
        self._transfers: Transfers[UnitBucket] | None = None

    def buckets(self) -> Sequence[UnitBucket]:
        return self._buckets

    def begin(self) -> None:
        super().begin()
        self._transfers = None

    def collect(self) -> None:
        """Add the `.grad` of the unsharded parameters to the sums."""
        is_void, popped = self.unsharded.is_void, self.unsharded.pop_grads()
        self.padding.end()
        grads = {index: grad.detach().reshape(-1) for index, grad in popped.items()}
        for bucket in self._buckets if not is_void else []:
            bucket.deposit([grads.get(index) for index in bucket.indices])

    def reduce(self, header: Header) -> None:
        sent = [(bucket, self.comm) for bucket in self._buckets]
        self._transfers = Transfers(sent, header, self.make_divisor(header, FP32()), are_alike=False)
        self._launch_rest(poison=False)

    def give_up(self) -> None:
        self.padding.end()
        self._launch_rest(poison=True)

    def finish(self, final: FinalPass) -> None:
        if self._transfers is None or self._divisor is None or self._used_flags is None:
            raise not_reduced()
        for unit in self.units:
            unit.module.reshard()  # reentrant checkpoints may have unsharded the unit again
        scale = self._divisor.after_wire()
        self._norms.begin()
        for place, bucket in enumerate(self._transfers.wait_in_order()):
            bucket.publish(scale, self._norms, place)
        self._norms.copy_to(final)
        self._used_flags.drop_unused(self.params)
        # Every rank has the norms of the unsharded sums, but only the first rank of each mesh reports them.
        final.sumsq = torch.where(self._reports_norm, final.sumsq, 0.0)

    def _launch_rest(self, *, poison: bool) -> None:
        """Launch the missing collectives.

        The first collectives of all units precede all later collectives.
        """
        if self._transfers is None:
            return
        self._transfers.launch_rest(poison=poison)
        with Unbroken(self.comm):
            if self._used_flags is None:
                self._used_flags = self.used.all_reduce(
                    [poison or is_used for is_used in self.unsharded.used]
                )
