"""Retry of micro-batches that run out of memory, in smaller parts within the same window.

[Note: an attempt leaves no trace]
The forward and backward of a part may run out of memory at any operation; they are then repeated with fewer
items. Therefore `.grad` does not contain the sums of the window during an attempt. The sums so far are set
aside, autograd writes to new tensors, and after the backward the new tensors are added to the sums. This
works for every reducer that reads gradients from `.grad`:

 - the engine's own buckets, if they sum in place: the views of each bucket are set aside. Nothing writes to a
   bucket's memory before the attempt has succeeded. The in-place add then increments the versions of the
   views, like autograd's own add.
 - the engine's other buckets, and slots: either the gradients of the micro-batch's earlier parts or the sums
   that autograd keeps in `.grad` are set aside.

An attempt launches no collective. All parts are in one `micro_batch` block without `last_backward`, so the
header and all buckets are launched after the last part. For models with collective forwards, an error is
raised. After a failure the states of random generators and the module's buffers are restored.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pyengine.data.rng import rng_states, set_rng_states
from pyengine.engine.engine import Engine
from pyengine.engine.micro_batch import MicroBatch
from pyengine.ops.capture import report as report_uncapturable
from pyengine.ops.device import is_lazy, runs_ahead
from pyengine.window.header import Count, checked_count

# Texts of out-of-memory errors from the CPU allocator and cuBLAS, which raise a plain RuntimeError.
_TEXTS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")

# The types of values that are passed unchanged to every part of a batch.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Items:
    """The items of a batch, along dimension 0 of its tensors."""

    def __init__(self, batch: Any) -> None:
        self._leaves, self._structure = tree_flatten(batch, is_leaf=_is_plain_list)
        sizes = sorted({leaf.shape[0] for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.dim()})
        strange = [leaf for leaf in self._leaves if not isinstance(leaf, (Tensor, list, *_PLAIN))]
        if strange:
            raise TypeError(
                f"batch holds a {type(strange[0]).__name__}: expected tensors, numbers and strings, in "
                "dicts, lists and tuples; for a mapping pass dict(batch), and let fn use other objects from "
                "outside the batch"
            )
        if len(sizes) != 1:
            found = f"tensors of sizes {sizes} in dimension 0" if sizes else "no tensor with a dimension 0"
            raise ValueError(
                f"batch holds {found}: expected tensors with the same number of items in dimension 0; let fn "
                "use other tensors from outside the batch"
            )
        self.num = sizes[0]

    def part(self, start: int, stop: int) -> Any:
        """Return the part of the batch with the items from `start` to `stop`; its tensors are views."""
        return tree_unflatten([self._of(leaf, start, stop) for leaf in self._leaves], self._structure)

    def _of(self, leaf: Any, start: int, stop: int) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[start:stop] if leaf.dim() else leaf
        return leaf[start:stop] if isinstance(leaf, list) and len(leaf) == self.num else leaf


class Retries:
    """Runs the micro-batches of one engine, in smaller parts if memory runs out."""

    def __init__(self, engine: Engine) -> None:
        if problems := list(_problems(engine)):
            raise ValueError(f"retry_smaller: {'; '.join(problems)}")
        self._engine = engine
        modules = [] if engine.module is None else list(engine.module.modules())
        self._modules = [module for module in modules if any(True for _ in module.buffers(recurse=False))]
        # Includes parameters that the engine does not reduce, so that a failed attempt leaves no gradient in
        # them.
        others = [] if engine.module is None else engine.module.parameters()
        self._params = list({id(param): param for param in [*engine.reducer.params, *others]}.values())
        self._error = ""  # the first line of the error of the last attempt

    def run(self, micro_batch: MicroBatch, items: Items, fn: Callable[[Any], Any]) -> None:
        """Run the forward and backward of a micro-batch in parts of at most `engine.part_size` items."""
        report_uncapturable(
            "sync.retry_smaller repeats what ran out of memory, which a graph cannot do: use sync.backward"
        )
        engine = self._engine
        losses: list[Tensor] = []
        counts: list[Count] = []
        start = 0
        while start < items.num or not losses:
            left = items.num - start
            num = left if engine.part_size is None else min(engine.part_size, left)
            done = self._attempt(micro_batch, fn, items.part(start, start + num))
            if done is not None:
                losses.append(done[0])
                counts.append(done[1])
                start += num
                continue
            gc.collect()  # frees the memory of the failed attempt for parts of other sizes
            if runs_ahead(engine.device):
                torch.get_device_module(engine.device).empty_cache()
            if num <= 1:
                raise torch.OutOfMemoryError(
                    f"retry_smaller: {num} item of a micro-batch does not fit into memory: the forward and "
                    "backward of one item must fit; make items shorter, checkpoint activations, or free "
                    f"memory; then call sync.abandon(). ({self._error})"
                )
            engine.part_size = -(-num // 2)
            engine.window.num_retries += 1
            warnings.warn(
                f"{num} items of a micro-batch ran out of memory on rank {engine.comm.rank}: from now on "
                f"parts have at most {engine.part_size} items (sync.part_size)",
                stacklevel=3,
            )
        micro_batch.loss = (
            losses[0] if len(losses) == 1 else torch.stack([loss.double() for loss in losses]).sum()
        )
        if engine.known_denominators() is None:
            micro_batch.count = sum(counts[1:], start=counts[0])

    def _attempt(
        self, micro_batch: MicroBatch, fn: Callable[[Any], Any], part: Any
    ) -> tuple[Tensor, Count] | None:
        """Run a part and return its loss and count; if memory runs out, undo everything and return None."""
        engine = self._engine
        before = [param.grad for param in self._params]
        undo: list[Callable[[], object]] = []
        try:
            for param in self._params:
                param.grad = None
            undo.append(partial(set_rng_states, rng_states()))
            undo.append(self._keep_buffers())
            undo += [discard for each in engine.observers if (discard := each.keep()) is not None]
            loss, count = self._checked(fn(part))
            if engine.known_denominators() is None:
                engine.loss_checks.warn_of_reduction(loss, count)
            micro_batch.backward(loss)
            grads = [_merged(old, param.grad) for old, param in zip(before, self._params, strict=True)]
        except BaseException as error:
            for param, grad in zip(self._params, before, strict=True):
                param.grad = grad
            if not _is_out_of_memory(error):
                raise
            for each in undo:
                each()
            self._error = (str(error) or repr(error)).splitlines()[0]
            return None
        # From here on dense gradients need no new memory, so the additions cannot fail partway.
        dense: list[tuple[Tensor, Tensor]] = []
        for param, (grad, rest) in zip(self._params, grads, strict=True):
            param.grad = grad
            if grad is not None and rest is not None:
                dense.append((grad, rest))
        if dense:
            with torch.no_grad():
                torch._foreach_add_([grad for grad, _ in dense], [rest for _, rest in dense])
        return loss.detach(), count

    def _checked(self, returned: Any) -> tuple[Tensor, Count]:
        """Return the loss and the count that the user's function has returned."""
        totals = self._engine.known_denominators()
        if totals is not None:
            if isinstance(returned, tuple):
                raise TypeError(
                    "fn returned a tuple, but this window's counts were read ahead by sync.windows(loader, "
                    "count=...): expected only the loss, or the dict of losses"
                )
            return totals.weigh(returned, self._engine.device), 0
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise TypeError(
                f"fn returned a {type(returned).__name__}: expected (loss, count), the sum of a part's "
                "losses and the number of its items; means of parts do not add up to the mean of the whole"
            )
        return returned[0], checked_count(returned[1])

    def _keep_buffers(self) -> Callable[[], None]:
        """Return a function that restores the current buffers of the module and their values."""
        kept = [
            # Inference tensors cannot be written to outside of inference mode, so they need no copy.
            (module, name, buffer, None if buffer.is_inference() else buffer.clone())
            for module in self._modules
            for name, buffer in module.named_buffers(recurse=False)
        ]

        def undo() -> None:
            for module, name, buffer, values in kept:
                setattr(module, name, buffer)
                if values is not None:
                    # Autograd may have saved the buffer in an earlier forward; a write through `.data` does
                    # not bump its version counter.
                    buffer.data.copy_(values)

        return undo


def _merged(old: Tensor | None, new: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the new value of `.grad`, and a tensor (or None) that is to be added to it in place."""
    if old is None or new is None:
        return (new if old is None else old), None
    if old.layout is torch.strided:
        return old, new
    return (new + old if new.layout is torch.strided else old + new), None  # autograd does the same


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _is_plain_list(node: Any) -> bool:
    """Whether a value in a batch is a list without tensors, for example with one string per item."""
    return isinstance(node, list) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))


def _problems(engine: Engine) -> Iterator[str]:
    """Yield the reasons why a rank cannot repeat a forward without the other ranks."""
    if is_lazy(engine.device):
        yield f"on {engine.device} the host does not learn that memory ran out: make micro-batches smaller"
    remedy = "and other ranks would not run them again: make micro-batches small enough for every rank"
    if engine.reducer.has_collective_forwards:
        yield f"the forwards of a model that is sharded by FSDP2 are collective, {remedy}"
    elif engine.batch is not None or engine.reducer.counted is not None:
        yield (
            "ranks share batches or hold parts of the model (tensor, pipeline or expert parallelism), and "
            f"their forwards are collective, {remedy}"
        )
    named = [] if engine.module is None or engine.comm.world_size == 1 else engine.module.named_modules()
    synced = [name for name, module in named if isinstance(module, nn.SyncBatchNorm)]
    if synced:
        yield f"module {synced[0]!r} is a SyncBatchNorm, whose forwards are collective, {remedy}"
