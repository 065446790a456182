"""The fused operations over a flat buffer of gradients, as methods of `BucketPlan`.

`functional.py` provides the same operations without a plan. A plan describes n *slots* (ranges) of a flat 1-D
buffer. An op processes every slot in one call and one pass over memory. Ops on CPU and CUDA tensors run in
the native core, and ops on other devices run in `reference.py`. Results have the same bits with every
instruction set and thread count and on every GPU, except for the bits of a NaN. Autograd does not record ops:
they only read and write data. `versions.py` contains the public plan, which increments tensor versions.

On CUDA, an op is one kernel launch on the current stream for any number of slots, and the host does not wait
for it. A list of more than 4000 tensors needs further launches for its addresses, unless the list is a
`Pointers`; so does an op with two different lists of more than 256 tensors. The ops of a plan can be captured
in CUDA graphs after one op of the plan, with any dtypes, has run on the device. Keep the plan, the `Pointers`
and the tensors alive as long as the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.ops import cuda, native, reference
from pyengine.ops.device import runs_ahead
from pyengine.ops.overlap import check_into_flat, check_into_list, check_out_of_flat, check_results
from pyengine.ops.pointers import (
    DTYPE_CODES,
    Pointers,
    TensorList,
    check_each,
    check_flat,
    check_layout,
    check_scalars,
    check_scale,
    check_tensor,
    device_of,
    gather,
)

_FLOAT32 = (torch.float32,)


class BucketPlan:
    """The slots of n tensors in a flat buffer, for the fused ops.

    Args:
        offsets: int [n], first element of each slot in the flat buffer.
        numels: int [n], number of elements of each slot; 0 is allowed. Gaps between slots are never read or
            written.

    Every list of tensors has one entry per slot. All tensors of a list have the same dtype (float32, bfloat16
    or float16) and device. Each tensor is contiguous and has the numel of its slot; its alignment is
    arbitrary. `None` represents a parameter without a gradient. Pass `pointers(tensors)` instead of a list to
    check the list only once. A tensor that an op writes must not share memory with a tensor that the op
    reads. The only exception is an in-place op, in which both tensors occupy exactly the same memory, for the
    same slot and in the same dtype. Every scale is a 0-dim float32 tensor on the device of the other tensors;
    products are rounded to float32. The caller owns all memory.

    Raises:
        ValueError, TypeError: from the constructor and every op, for invalid arguments; raised before
            anything is written.

    Example:
        >>> plan = BucketPlan([0, 4], [3, 2])
        >>> flat = torch.zeros(6)
        >>> plan.pack_(flat, [torch.ones(3), torch.ones(2)], torch.tensor(2.0))
        >>> flat
        tensor([2., 2., 2., 0., 2., 2.])
    """

    def __init__(self, offsets: Sequence[int], numels: Sequence[int]) -> None:
        self.offsets, self.numels = tuple(map(operator.index, offsets)), tuple(map(operator.index, numels))
        self.flat_numel = check_layout(self.offsets, self.numels)
        self._slots = tuple(zip(self.offsets, self.numels, strict=True))
        core = native.core()
        self._native: native._core.BucketPlan | None = (
            None if core is None else core.BucketPlan(self.offsets, self.numels)
        )
        self._runners: dict[torch.device, native._core.BucketPlan | cuda.CudaPlan | None] = {
            torch.device("cpu"): self._native
        }

    def __repr__(self) -> str:
        return f"BucketPlan({len(self.numels)} slots, {sum(self.numels)} of {self.flat_numel} elements)"

    def pointers(self, tensors: TensorList) -> Pointers:
        """Check a list of tensors once, for use in many calls.

        Args:
            tensors: one entry per slot. The result keeps the tensors alive. If a tensor gets new memory,
                later ops use the new memory.

        Cost: no device work, except for lists of more than 256 CUDA tensors: one launch per 4000 tensors.

        Example:
            >>> plan = BucketPlan([0], [2])
            >>> plan.pointers([torch.ones(2)]).dtype
            torch.float32
        """
        # Copy the list, because the caller could remove a tensor from the list and thereby free it.
        pointers = gather("tensors", [*tensors], self.numels, self._native)
        return pointers if pointers.device is None else cuda.uploaded(pointers, pointers.device)

    def pack_(
        self,
        flat: Tensor,
        tensors: TensorList | Pointers,
        scale: Tensor,
        *,
        only_if: Tensor | None = None,
    ) -> None:
        """Write `cast(tensor * scale)` to every slot of `flat`, or zeros if the entry is None.

        Args:
            flat: float32, bfloat16 or float16 [at least flat_numel], written.
            tensors: one entry per slot, read.
            scale: float32 [].
            only_if: float32 []; if its value is 0, nothing is written. The host does not read this tensor.

        Cost: one read and one write per element (non-temporal stores above 8 MiB).

        Example:
            >>> flat = torch.empty(2, dtype=torch.bfloat16)
            >>> BucketPlan([0], [2]).pack_(flat, [torch.ones(2)], torch.tensor(0.5))
        """
        sources = self._gather("tensors", tensors, ("flat", flat))
        check_flat("flat", flat, self.flat_numel, flat.device)
        scalars = check_scalars(flat.device, scale, only_if)
        check_into_flat(self, ("flat", flat), ("tensors", sources), *scalars)
        runner = self._runner(flat.device)
        if runner is None:
            return reference.pack_(self._slots, flat, sources.tensors, scale, only_if)
        flag = 0 if only_if is None else only_if.data_ptr()
        runner.pack_(flat.data_ptr(), DTYPE_CODES[flat.dtype], sources.table, scale.data_ptr(), flag)

    def unpack_(
        self,
        tensors: TensorList | Pointers,
        flat: Tensor,
        scale: Tensor,
        *,
        only_if: Tensor | None = None,
    ) -> None:
        """Write `cast(flat[slot] * scale)` to every tensor; None entries are skipped.

        Args:
            tensors: one entry per slot, written.
            flat: float32, bfloat16 or float16 [at least flat_numel], read.
            scale: float32 [].
            only_if: float32 []; if its value is 0, nothing is written. The host does not read this tensor.

        Cost: one read and one write per element.

        Example:
            >>> grad = torch.empty(2)
            >>> BucketPlan([0], [2]).unpack_([grad], torch.ones(2), torch.tensor(0.5))
        """
        targets = self._gather("tensors", tensors, ("flat", flat))
        check_flat("flat", flat, self.flat_numel, flat.device)
        scalars = check_scalars(flat.device, scale, only_if)
        check_out_of_flat(self, ("tensors", targets), ("flat", flat), *scalars)
        runner = self._runner(flat.device)
        if runner is None:
            return reference.unpack_(self._slots, targets.tensors, flat, scale, only_if)
        flag = 0 if only_if is None else only_if.data_ptr()
        runner.unpack_(flat.data_ptr(), DTYPE_CODES[flat.dtype], targets.table, scale.data_ptr(), flag)

    def accumulate_(
        self, acc: Tensor, grads: TensorList | Pointers, scale: Tensor, *, first: bool, nonfinite: Tensor
    ) -> None:
        """Set `acc[slot] = grad * scale` if `first`; otherwise add `grad * scale` to the slot.

        The product and the sum are rounded separately.

        Args:
            acc: float32 [at least flat_numel], written; not read if `first`.
            grads: one entry per slot, read. For None, the slot is zeroed if `first`, and unchanged otherwise.
            scale: float32 [].
            first: whether to overwrite `acc`, as in the first micro-batch of a window.
            nonfinite: uint8 [n], OR-ed with 1 for each slot in which any `grad * scale` is inf or NaN.

        Cost: the op reads each gradient once, writes 4 bytes per element, and reads 4 bytes per element
        unless `first`. In total it moves 10 bytes per bfloat16 element, or 6 if `first`.

        Example:
            >>> plan, acc, flags = BucketPlan([0], [2]), torch.empty(2), torch.zeros(1, dtype=torch.uint8)
            >>> plan.accumulate_(acc, [torch.ones(2)], torch.tensor(1.0), first=True, nonfinite=flags)
        """
        sources = self._gather("grads", grads, ("acc", acc))
        check_tensor("acc", acc, _FLOAT32, self.flat_numel, acc.device)
        check_scale("scale", scale, acc.device)
        check_each("nonfinite", nonfinite, torch.uint8, len(self.numels), acc.device)
        check_into_flat(self, ("acc", acc), ("grads", sources), ("scale", scale))
        check_results(self, [("nonfinite", nonfinite)], [("grads", sources)], ("acc", acc), ("scale", scale))
        runner = self._runner(acc.device)
        if runner is None:
            return reference.accumulate_(
                self._slots, acc, sources.tensors, scale, first=first, nonfinite=nonfinite
            )
        runner.accumulate_(acc.data_ptr(), sources.table, scale.data_ptr(), first, nonfinite.data_ptr())

    def accumulate_cast_(
        self,
        wire: Tensor,
        acc: Tensor,
        grads: TensorList | Pointers,
        grad_scale: Tensor,
        wire_scale: Tensor,
        *,
        first: bool,
        nonfinite: Tensor,
    ) -> None:
        """Write `cast((acc[slot] + grad * grad_scale) * wire_scale)` to every slot of `wire`.

        This op accumulates the last micro-batch of a window and casts the sum to the communication dtype in
        one pass.

        Args:
            wire: float32, bfloat16 or float16 [at least flat_numel], written. May be `acc` itself.
            acc: float32 [at least flat_numel], read unless `first`.
            grads: one entry per slot, read. For None, `acc * wire_scale` is written, or zeros if `first`.
            grad_scale, wire_scale: float32 [].
            first: whether the window has a single micro-batch, so that `acc` is not used.
            nonfinite: uint8 [n], OR-ed with 1 for each slot of `wire` that contains inf or NaN (float16 may
                overflow).

        Cost: the op reads 4 bytes per element (0 if `first`), reads each gradient once, and writes `wire`
        once. In total it moves 8 bytes per bfloat16 element, or 4 if `first`.

        Example:
            >>> plan, flags, one = BucketPlan([0], [2]), torch.zeros(1, dtype=torch.uint8), torch.tensor(1.0)
            >>> wire, acc = torch.empty(2, dtype=torch.bfloat16), torch.ones(2)
            >>> plan.accumulate_cast_(wire, acc, [torch.ones(2)], one, one, first=False, nonfinite=flags)
        """
        sources = self._gather("grads", grads, ("wire", wire))
        check_flat("wire", wire, self.flat_numel, wire.device)
        check_tensor("acc", acc, _FLOAT32, self.flat_numel, wire.device)
        check_scale("grad_scale", grad_scale, wire.device)
        check_scale("wire_scale", wire_scale, wire.device)
        check_each("nonfinite", nonfinite, torch.uint8, len(self.numels), wire.device)
        scales = ("grad_scale", grad_scale), ("wire_scale", wire_scale)
        read = scales if first else (*scales, ("acc", acc))
        check_into_flat(self, ("wire", wire), ("grads", sources), *read)
        check_results(self, [("nonfinite", nonfinite)], [("grads", sources)], ("wire", wire), *read)
        runner = self._runner(wire.device)
        if runner is None:
            return reference.accumulate_cast_(
                self._slots,
                wire,
                acc,
                sources.tensors,
                grad_scale,
                wire_scale,
                first=first,
                nonfinite=nonfinite,
            )
        runner.accumulate_cast_(
            wire.data_ptr(), DTYPE_CODES[wire.dtype], acc.data_ptr(), sources.table,
            grad_scale.data_ptr(), wire_scale.data_ptr(), first, nonfinite.data_ptr(),
        )  # fmt: skip

    def unscale_norm(
        self,
        tensors: TensorList | Pointers,
        out: TensorList | Pointers | None,
        scale: Tensor,
        *,
        sumsq: Tensor,
        nonfinite: Tensor,
    ) -> None:
        """Compute the sum of squares of `y = tensor * scale`, flag inf and NaN, and optionally store y.

        Args:
            tensors: one entry per slot, read. For None, the sum is 0.
            out: if None, y is not stored. If `out` is the list `tensors`, the op works in place. If it is
                a different list, y is stored in that list's dtype.
            scale: float32 [].
            sumsq: float64 [n], overwritten with Σ y² of each slot, where y is the stored value (after the
                cast to the dtype of `out`). The summation order is fixed, so the bits depend only on the
                values.
            nonfinite: uint8 [n], OR-ed with 1 for each slot in which any y is inf or NaN.

        Cost: one read per element, and one write if `out` is given.

        Example:
            >>> plan, flags = BucketPlan([0], [2]), torch.zeros(1, dtype=torch.uint8)
            >>> sumsq = torch.empty(1, dtype=torch.float64)
            >>> plan.unscale_norm([torch.ones(2)], None, torch.tensor(2.0), sumsq=sumsq, nonfinite=flags)
            >>> sumsq
            tensor([8.], dtype=torch.float64)
        """
        two_lists, beside = not (out is None or out is tensors), ("sumsq", sumsq)
        sources = self._gather("tensors", tensors, beside, two_lists=two_lists)
        targets = None if out is None else sources
        if out is not None and two_lists:
            targets = self._gather("out", out, beside, two_lists=True)
        check_scale("scale", scale, sumsq.device)
        check_each("sumsq", sumsq, torch.float64, len(self.numels), sumsq.device)
        check_each("nonfinite", nonfinite, torch.uint8, len(self.numels), sumsq.device)
        if targets is not None:
            name = "tensors" if targets is sources else "out"
            check_into_list(self, (name, targets), ("tensors", sources), ("scale", scale))
        lists = [("tensors", sources)]
        if targets is not None and targets is not sources:
            lists.append(("out", targets))
        check_results(self, [("sumsq", sumsq), ("nonfinite", nonfinite)], lists, ("scale", scale))
        runner = self._runner(sumsq.device)
        if runner is None:
            stored = [None] * len(self.numels) if targets is None else targets.tensors
            return reference.unscale_norm(sources.tensors, stored, scale, sumsq=sumsq, nonfinite=nonfinite)
        runner.unscale_norm(
            sources.table, None if targets is None else targets.table,
            scale.data_ptr(), sumsq.data_ptr(), nonfinite.data_ptr(),
        )  # fmt: skip

    def _gather(
        self,
        name: str,
        tensors: TensorList | Pointers,
        beside: tuple[str, Tensor],
        *,
        two_lists: bool = False,
    ) -> Pointers:
        """Collect the addresses of a list, which must be on the same device as the named tensor `beside`."""
        pointers, device = gather(name, tensors, self.numels, self._native), device_of(*beside)
        if pointers.device is not None and pointers.device != device:
            raise ValueError(f"{name} are on {pointers.device}; expected {device}, like the other tensors")
        return cuda.for_one_call(pointers, device, two_lists=two_lists)

    def _runner(self, device: torch.device) -> native._core.BucketPlan | cuda.CudaPlan | None:
        """Return the object that runs ops on raw addresses, or None for the PyTorch reference."""
        if device not in self._runners:
            has_kernels = device.type == "cuda" and native.cuda_core() is not None
            plan = self._native if has_kernels else None
            layout = self.offsets, self.numels
            self._runners[device] = None if plan is None else cuda.plan_on(device, plan, layout)
        return self._runners[device]


def add_up(sumsq: Tensor) -> Tensor:
    """Add the sums of squares of all slots in a fixed order.

    Args:
        sumsq: float64 [n], n at least 1, read.

    Returns:
        float64 [], new memory on the same device.

    Cost: one read of 8 bytes per slot.
    """
    # On an accelerator `sum` has a fixed order for a given length, but `cumsum` may have no fixed order.
    return sumsq.sum() if runs_ahead(sumsq.device) else sumsq.cumsum(0)[-1]
