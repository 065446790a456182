"""`ExactSum`: gradient sums whose bits do not depend on order, grouping or the number of ranks."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyengine.ops import exact_reference, native
from pyengine.ops.exact_reference import BLOCK
from pyengine.ops.overlap import check_into, check_results
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import DTYPE_CODES, Pointers, TensorList, check_dense, check_each, check_flat

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TERMS = 4096


def _check(plan: BucketPlan, numel: int, terms: int) -> None:
    if not 1 <= terms <= MAX_TERMS:
        raise ValueError(
            f"terms={terms}; expected 1 to {MAX_TERMS}, the number of micro-batches in a window over all "
            "ranks: if there are more, add several micro-batches of a rank in float32 and deposit their sum "
            "as one term"
        )
    if numel % BLOCK or numel < plan.flat_numel:
        raise ValueError(
            f"numel={numel}; expected a multiple of {BLOCK}, at least flat_numel={plan.flat_numel}; the "
            f"nearest is {-(-max(numel, plan.flat_numel) // BLOCK) * BLOCK}"
        )
    for slot, offset in enumerate(plan.offsets):
        if offset % BLOCK:
            raise ValueError(
                f"slot {slot} has offset {offset}; expected a multiple of {BLOCK}, so that no block contains "
                "elements of two slots"
            )


class ExactSum:
    """Sum of gradients with the same bits for every order of its terms.

    The bits do not depend on the order or grouping of the terms, or on the number of ranks. Every element is
    stored as two integers on an absolute grid; the largest magnitude in the element's block of 64 elements
    determines the grid. Integers are added exactly, so partial sums of any ranks can be merged in any order:

        torch.distributed.all_reduce(bins := total.bins.clone(), ReduceOp.MAX)
        total.align_(bins)
        torch.distributed.all_reduce(total.hi)
        torch.distributed.all_reduce(total.lo)

    The error of a term is at most max(2^-width · the largest magnitude in its block over all terms, 2^-126),
    independent of the number of terms or ranks. Terms of one block that span fewer than `width` binades are
    added exactly.

    Args:
        plan: plan of the slots; every offset must be a multiple of 64.
        numel: number of elements of the flat buffer, a multiple of 64 and at least `plan.flat_numel`.
        terms: the maximum number of terms in one sum, over all ranks whose sums will be merged; 1 to 4096.
            More terms leave fewer bits for each term: `width` is 31 - ceil(log2 terms). The sum can overflow
            with more than `terms` terms, so the caller has to count them.
        device: device of the sum; "cuda" without an index is the current device. Sums on CPU and CUDA run in
            the native core, and sums on other devices in `exact_reference.py`.
        limbs: int32 [2 * numel] on `device`, filled with zeros. This object takes ownership, and uses it as
            the memory of the sum. If None, new memory is allocated.

    Attributes:
        limbs: int32 [2, numel], owned by this object: hi and lo.
        hi, lo: int32 [numel], the rows of `limbs`, which are zero outside of slots.
        bins: uint8 [numel // 64], owned by this object. 0 marks an empty block (no terms, or only zeros and
            denormals). 255 marks an invalid ("poisoned") block, in which a term contained an inf, a NaN or a
            magnitude of 2^126 or more. The limbs of empty and poisoned blocks are zero.
        width: number of bits of a limb (integer) that one term uses.

    Raises:
        ValueError, TypeError: from the constructor and every method, for invalid arguments; raised before
            anything is written.

    Example:
        >>> plan, flags = BucketPlan([0], [3]), torch.zeros(1, dtype=torch.uint8)
        >>> total = ExactSum(plan, numel=64, terms=3, device=torch.device("cpu"))
        >>> total.deposit_([torch.tensor([1.0, 2.0, 1e8])], first=True, nonfinite=flags)
        >>> total.deposit_([torch.tensor([1.0, 2.0, 1.0])], first=False, nonfinite=flags)
        >>> total.deposit_([torch.tensor([1.0, 2.0, -1e8])], first=False, nonfinite=flags)
        >>> out = torch.empty(64)
        >>> total.round_(out)
        >>> out[:3]
        tensor([3., 6., 1.])
    """

    def __init__(
        self,
        plan: BucketPlan,
        *,
        numel: int,
        terms: int,
        device: torch.device | str,
        limbs: Tensor | None = None,
    ) -> None:
        _check(plan, numel, terms)
        bins = torch.zeros(numel // BLOCK, dtype=torch.uint8, device=device)
        if limbs is None:
            limbs = torch.zeros(2 * numel, dtype=torch.int32, device=device)
        # `device` may have no index, so use bins.device, which has an index.
        check_each("limbs", limbs, torch.int32, 2 * numel, bins.device, of="limb")
        self.width = 31 - (terms - 1).bit_length()
        self._use(plan, limbs.view(2, numel), bins)

    def _use(self, plan: BucketPlan, limbs: Tensor, bins: Tensor) -> None:
        self.limbs, self.bins = limbs, bins
        self.hi, self.lo = limbs
        self._plan, self._runner = plan, plan._runner(limbs.device)

    def __repr__(self) -> str:
        return f"ExactSum({self._plan}, width {self.width}, on {self.hi.device})"

    def over(self, plan: BucketPlan) -> Self:
        """Return the same sum, in the same memory, for terms in the slots of another plan.

        Args:
            plan: plan of slots within `numel`; every offset must be a multiple of 64.

        Cost: no device work.
        """
        _check(plan, self.hi.numel(), 1)
        other = copy(self)
        other._plan, other._runner = plan, plan._runner(self.hi.device)
        return other

    def between(self, start: int, stop: int) -> ExactSum:
        """Return a range of this sum, in the same memory, as a sum with one slot.

        Args:
            start, stop: first element and end of the range; multiples of 64, at most `numel`.

        Cost: no device work.

        Example:
            >>> total = ExactSum(BucketPlan([0, 64], [3, 3]), numel=128, terms=8, device=torch.device("cpu"))
            >>> total.between(64, 128).bins.numel()
            1
        """
        if start % BLOCK or stop % BLOCK or not 0 <= start <= stop <= self.hi.numel():
            raise ValueError(
                f"start={start}, stop={stop}; expected multiples of {BLOCK} from 0 to {self.hi.numel()}"
            )
        other = copy(self)
        plan, blocks = BucketPlan([0], [stop - start]), slice(start // BLOCK, stop // BLOCK)
        other._use(plan, self.limbs[:, start:stop], self.bins[blocks])
        return other

    def deposit_(self, tensors: TensorList | Pointers, *, first: bool, nonfinite: Tensor) -> None:
        """Add one term, which has one tensor per slot, to the sum.

        Args:
            tensors: one entry per slot, read. None adds nothing.
            first: True overwrites the sum with this term, so the sum need not be cleared. Slots without a
                tensor become empty.
            nonfinite: uint8 [n], OR-ed with 1 for each slot in which this term makes a block invalid.

        Cost: the op reads each gradient once, writes 8 bytes per element, and reads 8 bytes per element
        unless `first`. In total it moves 20 bytes per float32 element (12 if `first`), and 18 bytes per
        bfloat16 element (10 if `first`). In addition, it moves one byte per block.

        Example:
            >>> plan, flags = BucketPlan([0], [3]), torch.zeros(1, dtype=torch.uint8)
            >>> total = ExactSum(plan, numel=64, terms=8, device=torch.device("cpu"))
            >>> total.deposit_([torch.ones(3)], first=True, nonfinite=flags)
        """
        sources = self._plan._gather("tensors", tensors, ("hi", self.hi))
        check_each("nonfinite", nonfinite, torch.uint8, len(self._plan.numels), self.hi.device)
        sums = ("limbs", self.limbs), ("bins", self.bins)
        check_into(self._plan, sums, ("tensors", sources))
        check_results(self._plan, [("nonfinite", nonfinite)], [("tensors", sources)], *sums)
        if self._runner is None:
            return exact_reference.deposit_(
                self._plan._slots, self._limbs, sources.tensors, self.width, first=first, nonfinite=nonfinite
            )
        self._runner.exact_deposit_(self._native(), sources.table, first, nonfinite.data_ptr())

    def align_(self, bins: Tensor) -> None:
        """Shift the integers of every block to a larger bin (exponent range).

        The result is the same as if all terms had been added with the larger bin. Afterwards `self.bins`
        equals `bins`, and the limbs of sums with equal bins can be added.

        Args:
            bins: uint8 [numel // 64], read; at least `self.bins` in every block, usually the maximum over all
                ranks. A block that is invalid on one rank is then invalid on all ranks.

        Cost: the op reads 2 bytes per block. In each block whose bin grows, it reads 4 bytes and writes 8
        bytes per element.

        Example:
            >>> total = ExactSum(BucketPlan([0], [3]), numel=64, terms=8, device=torch.device("cpu"))
            >>> total.align_(torch.full((1,), 5, dtype=torch.uint8))
            >>> total.bins
            tensor([5], dtype=torch.uint8)
        """
        check_each("bins", bins, torch.uint8, self.bins.numel(), self.hi.device, of="block")
        if self._runner is None:
            return exact_reference.align_(self._limbs, bins)
        self._runner.exact_align_(self._native(), bins.data_ptr())

    def merge_(self, other: ExactSum) -> None:
        """Add another sum, as if its terms had been added to this sum.

        Args:
            other: a sum over the same elements with the same `terms`; both sums together must not have more
                than `terms` terms. The method also aligns `other`, in place.

        Cost: the op reads 16 bytes and writes 8 bytes per element, and aligns both sums.

        Example:
            >>> plan, flags = BucketPlan([0], [3]), torch.zeros(1, dtype=torch.uint8)
            >>> one, two = (ExactSum(plan, numel=64, terms=2, device=torch.device("cpu")) for _ in range(2))
            >>> one.deposit_([torch.full((3,), 1e8)], first=True, nonfinite=flags)
            >>> two.deposit_([torch.ones(3)], first=True, nonfinite=flags)
            >>> one.merge_(two)
            >>> out = torch.empty(64)
            >>> one.round_(out)
            >>> float(out[0].double())
            100000000.0
        """
        if (self.width, self.limbs.shape) != (other.width, other.limbs.shape):
            raise ValueError(
                f"other is {other} of {other.limbs.shape[1]} elements; expected a sum like {self}"
            )
        bins = torch.maximum(self.bins, other.bins)
        self.align_(bins)
        other.align_(bins)
        self.limbs += other.limbs

    def round_(self, out: Tensor) -> None:
        """Write the sum, rounded once from the exact integers.

        Empty blocks become +0, and invalid blocks become NaN. To compute a mean, multiply the rounded sum by
        a scalar that is the same on all ranks. The product adds one rounding, and equal bits stay equal.

        Args:
            out: float32, bfloat16 or float16 [at least numel]; the first `numel` elements are written. A
                float32 `out` may share the memory of `hi`, whose limbs are then overwritten: the next term
                must have `first=True`.

        Cost: the op reads 8 bytes per element, and writes `out` once.

        Example:
            >>> total = ExactSum(BucketPlan([0], [3]), numel=64, terms=8, device=torch.device("cpu"))
            >>> total.round_(total.hi.view(torch.float32))
        """
        check_flat("out", out, self.hi.numel(), self.hi.device)
        self._check_place(out)
        if self._runner is None:
            return exact_reference.round_(self._limbs, out, self.width)
        self._runner.exact_round_(self._native(), out.data_ptr(), DTYPE_CODES[out.dtype])

    def _native(self) -> Any:
        """Return the native view of the sum for one call.

        The view is not cached, because the limbs may be `.grad`, whose storage a user may move
        (`share_memory_()`).
        """
        for name, limb in zip(("hi", "lo", "bins"), self._limbs, strict=True):
            check_dense(name, limb)
        hi, lo, places = (limb.data_ptr() for limb in self._limbs)
        return native._core.ExactSum(hi, lo, places, self.bins.numel(), self.width)

    @property
    def _limbs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hi, self.lo, self.bins

    def _check_place(self, out: Tensor) -> None:
        """Check that `out` either does not overlap the limbs or starts exactly at the limbs.

        Threads run in no fixed order, so writes to a shifted `out` could overwrite limbs that have not been
        read yet.
        """
        for name, limb in (("hi", self.hi), ("lo", self.lo)):
            ahead = out.data_ptr() - limb.data_ptr()
            overlaps = -out.nbytes < ahead < limb.nbytes
            if overlaps and not (ahead == 0 and out.dtype == torch.float32):
                raise ValueError(
                    f"out is {out.dtype} and begins {ahead} bytes into {name}; expected memory of its own, "
                    f"or float32 memory that begins where {name} begins: {name}.view(torch.float32)"
                )
