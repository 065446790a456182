"""What is asked of DDP's own reducer, private calls and all; checked against torch 2.9 to 2.13.

Here DDP is told when to expect gradients, which parameters a backward has left out, and to forget one that
failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pyengine.gradients.ddp.hook import HookState, comm_hook
from pyengine.gradients.slots import dense_strides


def visible_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the named parameters that DDP was not told to ignore, in its order and by its own rule."""
    found: dict[int, tuple[str, Parameter]] = {}
    for prefix, module in ddp.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if f"{prefix}.{name}" not in ddp.parameters_to_ignore:
                found.setdefault(id(param), (f"{prefix}.{name}".lstrip("."), param))
    return list(found.values())


def ignored_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the named parameters that DDP ignores, in the order of registration."""
    visible = {id(param) for _, param in visible_parameters(ddp)}
    return [(name, param) for name, param in ddp.module.named_parameters() if id(param) not in visible]


def zero_buckets(ddp: DistributedDataParallel) -> Sequence[Any]:
    """Return DDP's buckets as they are laid out now, over new buffers of zeros.

    Cost: writes an element a gradient.
    """
    buckets: Sequence[Any] = ddp.reducer._get_zeros_like_grad_buckets()
    return buckets


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the parameters in DDP's buckets, in the order of its indices: those that it was made for."""
    reduced = {id(param) for bucket in zero_buckets(ddp) for param in bucket.parameters()}
    return [(name, param) for name, param in visible_parameters(ddp) if id(param) in reduced]


def problems_of_ddp(ddp: DistributedDataParallel) -> list[str]:
    """Say which of DDP's other ways to reduce would go past the engine."""
    found = []
    if ddp._use_python_reducer:
        found.append(
            "ddp_model was made under torch._dynamo.config.optimize_ddp='python_reducer', which takes "
            "DDP's buckets off the backward: nothing would be reduced; make it under 'ddp_optimizer', the "
            "default"
        )
    if ddp._delay_all_reduce_params:
        found.append(
            "ddp_model was made with delay_all_reduce_named_params, whose gradients DDP reduces by itself "
            "in every backward: leave it out, the engine sends gradients once a window anyway"
        )
    if ddp.mixed_precision is not None:
        found.append(
            "ddp_model was made with mixed_precision, which is a communication hook of its own: leave it "
            "out, and use torch.autocast or narrow parameters"
        )
    elif ddp._comm_hooks and released_state(ddp) is None:
        found.append(
            "ddp_model has a communication hook, and DDP takes only one: wrap the module anew, without "
            "register_comm_hook and other engines"
        )
    return found


def released_state(ddp: DistributedDataParallel) -> HookState | None:
    """Return the state of our hook that a closed engine has left on DDP, which takes one hook for good."""
    states = [state for hook, state in ddp._comm_hooks if hook is comm_hook]
    return next((state for state in states if isinstance(state, HookState) and state.is_released), None)


def outside_buckets(ddp: DistributedDataParallel) -> list[str]:
    """Say which trained parameters DDP does not know."""
    reduced = {id(param) for _, param in reduced_parameters(ddp)}
    return [
        f"parameter {name!r} requires a gradient and is in none of DDP's buckets: it was added or unfrozen "
        "after DistributedDataParallel was made; wrap the complete model"
        for name, param in visible_parameters(ddp)
        if param.requires_grad and id(param) not in reduced
    ]


class OnlyDDP:
    """Refuses forwards of a model through another DDP, whose hooks would reduce its gradients, too.

    A forward pre-hook; copies and files of the model have one that does nothing.

    Args:
        ddp: the only one.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ref(ddp)
        self._mine = {id(param) for _, param in visible_parameters(ddp)}
        self._harmless: WeakSet[DistributedDataParallel] = WeakSet()

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        other = DistributedDataParallel._active_ddp_module  # the innermost one whose forward runs
        if other is None or other is self._ddp() or other in self._harmless:
            return
        if self._mine.isdisjoint(id(param) for _, param in visible_parameters(other)):
            self._harmless.add(other)
        elif torch.is_grad_enabled() and other.require_backward_grad_sync:
            raise RuntimeError(
                "call the ddp_model that pe.attach drives: this forward runs through another "
                "DistributedDataParallel over the same parameters, which would reduce their gradients in "
                "every backward, before the engine sums them over ranks. To evaluate with it use "
                "torch.no_grad()"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchecked, ()


def _unchecked() -> Any:
    """Return the hook of a model that no engine drives."""
    return _check_nothing


def _check_nothing(*_: Any) -> None:
    pass


class ReducerDriver:
    """Drives DDP's reducer over one window after the other.

    Args:
        ddp: the wrapped model.
        state: of the communication hook.
        params: the reduced parameters, in DDP's order.

    Attributes:
        finds_unused: whether DDP looks for parameters that its backward will not reach.
        is_ready: whether DDP can reduce: with static_graph it has to learn the graph first, by one backward.
    """

    def __init__(self, ddp: DistributedDataParallel, state: HookState, params: Sequence[Parameter]) -> None:
        self._ddp, self._state, self._params = ddp, state, params
        self._reducer: Any = ddp.reducer
        self._index = {param: index for index, param in enumerate(params)}
        self._anchor = torch.zeros((), dtype=torch.float32, device=params[0].device, requires_grad=True)
        self.finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self.is_ready = not ddp.static_graph
        # By then DDP must not have counted anything: it counts every backward from the first one on.
        self._reach_counts = None if self.is_ready else _ReachCounts(params)
        self._counts = [1] * len(params)  # how often a backward reaches each
        self._stats: list[int] = []
        self._single_rank_group = _SingleRankGroup()
        # DDP would learn in whichever backward is a rank's first, and wait for the other ranks there.
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = True

    def release(self) -> None:
        """Let DDP learn a static graph by itself, if it has not here."""
        self._stop_counting()
        if self._ddp.static_graph:
            self._ddp._static_graph_delay_allreduce_enqueued = self.is_ready

    def rebuild_buckets(self) -> bool:
        """Let DDP lay its buckets out in the order in which gradients came, once; say whether it did."""
        rebuilt: bool = self._reducer._rebuild_buckets()
        self._ddp._has_rebuilt_buckets = self._ddp._has_rebuilt_buckets or rebuilt
        return rebuilt

    @contextmanager
    def learning_graph(self) -> Iterator[None]:
        """Let DDP learn the graph from the body if that is this rank's first backward; nothing travels.

        It cannot forget half a backward, nor other ones: after these this rank reduces by hand.
        """
        reached = self._reach_counts
        if reached is None or any(reached.times):
            self._stop_counting()
            yield
            return
        reducer = self._reducer
        reducer._update_process_group(self._single_rank_group)
        try:
            with self._state.without_reduction():
                reducer.prepare_for_forward()
                reducer.prepare_for_backward([])
                yield
                reducer._delay_all_reduce()
            self._counts = reached.times
            self.is_ready = True
        finally:
            self._stop_counting()
            if not self.is_ready and not self._ddp._has_rebuilt_buckets:
                reducer._reset_state()  # DDP lays out no buckets while it expects gradients
            reducer._update_process_group(self._ddp.process_group)

    def prepare_for_backward(self, roots: Sequence[Tensor]) -> None:
        """Let DDP expect the gradients of a backward from `roots`, which it reads if it finds_unused."""
        self._reducer.prepare_for_forward()
        self._reducer.prepare_for_backward(list(roots) if self.finds_unused else [])
        self._stats = self._reducer.get_backward_stats()

    def mark_unreached(self, candidates: Sequence[Parameter]) -> None:
        """Mark those of the candidates that DDP was not notified of, so that its buckets complete; no hook of
        theirs runs.
        """
        # A custom Function may bring no gradient for a parameter that it reached: nothing has changed, and
        # DDP was notified.
        stats = self._reducer.get_backward_stats()
        indices = [self._index[param] for param in candidates]
        self._mark_ready([index for index in indices if stats[index] == self._stats[index]])

    def reduce_all(self) -> None:
        """Let DDP reduce what `.grad` holds, without a backward."""
        if not self.is_ready:
            self.reduce_past_ddp(0)
            return
        params = self._params
        if self.finds_unused:
            trained = [param for param in params if param.requires_grad]
            params = [param for param in trained if param.grad is not None] or trained[:1]
        with torch.enable_grad():
            self.prepare_for_backward([_Reaches.apply(*params)])  # type: ignore[no-untyped-call]
        self._mark_ready([self._index[param] for param in params])

    def reduce_past_ddp(self, num_sent: int) -> None:
        """Reduce the buckets behind the first `num_sent` past DDP, and write the results into `.grad`.

        Cost: two copies of these buckets, and their reductions.
        """
        rest = self._reducer._get_zeros_like_grad_buckets()[num_sent:]
        for bucket in rest:
            for param, slot in _slots(bucket):
                if param.grad is not None:
                    slot.copy_(param.grad)
        # All start before one is waited for: the last one drives on those of several collectives.
        futures = [comm_hook(self._state, bucket) for bucket in rest]
        for bucket, future in zip(rest, futures, strict=True):
            future.wait()
            publish(bucket, bucket.parameters())
        self._reducer._push_all_rebuilt_params()  # as on the other ranks, for whose orders rank 0's stands

    def all_reduce_used_map(self) -> None:
        """Take part in DDP's all-reduce of its map of used parameters, int32 `[params]`."""
        if self.finds_unused:
            dist.all_reduce(self._reducer._get_local_used_map(), group=self._ddp.process_group)

    def without_published_grad(self) -> list[Parameter]:
        """Return the parameters whose results DDP does not put into `.grad`:
        it takes them for unused for good.
        """
        return [param for param, times in zip(self._params, self._counts, strict=True) if not times]

    def reset(self) -> None:
        """Let DDP forget a backward that was not finished, after everything that was sent has landed."""
        if self.finds_unused or not self._ddp._has_rebuilt_buckets:
            self._reducer._reset_state()
            self._reducer._push_all_rebuilt_params()
        elif self.is_ready:
            # A reset would have this rank alone rebuild its buckets. So DDP finishes, and nothing travels.
            with self._state.without_reduction():
                self.prepare_for_backward([])
                self._mark_ready(range(len(self._params)))

    def _stop_counting(self) -> None:
        if self._reach_counts is not None:
            self._reach_counts.stop()
            self._reach_counts = None

    def _mark_ready(self, indices: Sequence[int]) -> None:
        """Tell DDP that parameters are ready as they are, from inside a backward,
        where alone it can finish.
        """
        calls = [index for index in indices for _ in range(self._counts[index])]

        def mark(_: Tensor) -> None:
            for index in calls:
                self._reducer._autograd_hook(index)

        with torch.enable_grad():
            zero = self._anchor.clone()
        zero.register_hook(mark)
        zero.backward()
        self._anchor.grad = None


class _ReachCounts:
    """Counts how often backwards reach each parameter, until `stop`.

    Attributes:
        times: by parameter.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.times = times = [0] * len(params)

        def count(index: int, *_: Any) -> None:
            times[index] += 1

        edges = [(i, get_gradient_edge(p).node) for i, p in enumerate(params) if p.requires_grad]
        self._hooks = [node.register_hook(partial(count, index)) for index, node in edges]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _SingleRankGroup(dist.ProcessGroup):
    """A process group of this rank only."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def allreduce(self, tensors: Any, *_: Any) -> dist.Work:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(tensors)
        work: dist.Work = _create_work_from_future(future)
        return work


def publish(bucket: Any, params: Sequence[Parameter]) -> None:
    """Write a landed bucket into `.grad` of those of its parameters."""
    wanted = {id(param) for param in params}
    for param, value in _slots(bucket) if wanted else ():
        if id(param) in wanted:
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(value)


def _slots(bucket: Any) -> Iterator[tuple[Parameter, Tensor]]:
    """Return each parameter of a bucket with its part of the buffer, strided as DDP does it."""
    flat, offset = bucket.buffer(), 0
    for param in bucket.parameters():
        yield param, flat.as_strided(param.size(), dense_strides(param), offset)
        offset += param.numel()


class _Reaches(torch.autograd.Function):
    """A zero from which a backward would reach every given parameter; it is never run."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        del ctx
        return params[0].new_zeros(())
