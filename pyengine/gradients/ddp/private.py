"""Calls of DDP's reducer, including private ones; tested with torch 2.9 to 2.13.

`ReducerDriver` prepares DDP for a backward, marks parameters that the backward has not reached as ready, and
resets DDP after a failed backward.
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

_NEVER = 2**31 - 1  # the largest distance, in iterations, between two that DDP times


def visible_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the named parameters that DDP does not ignore, in DDP's order."""
    found: dict[int, tuple[str, Parameter]] = {}
    for prefix, module in ddp.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if f"{prefix}.{name}" not in ddp.parameters_to_ignore:
                found.setdefault(id(param), (f"{prefix}.{name}".lstrip("."), param))
    return list(found.values())


def ignored_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the named parameters that DDP ignores, in registration order."""
    visible = {id(param) for _, param in visible_parameters(ddp)}
    return [(name, param) for name, param in ddp.module.named_parameters() if id(param) not in visible]


def zero_buckets(ddp: DistributedDataParallel) -> Sequence[Any]:
    """Return DDP's current buckets over new buffers of zeros."""
    buckets: Sequence[Any] = ddp.reducer._get_zeros_like_grad_buckets()
    return buckets


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Parameter]]:
    """Return the parameters in DDP's buckets, in the order of DDP's indices."""
    reduced = {id(param) for bucket in zero_buckets(ddp) for param in bucket.parameters()}
    return [(name, param) for name, param in visible_parameters(ddp) if id(param) in reduced]


def problems_of_ddp(ddp: DistributedDataParallel) -> list[str]:
    """Return messages for DDP settings that reduce gradients past the engine."""
    found = []
    if ddp._use_python_reducer:
        found.append(
            "ddp_model was made under torch._dynamo.config.optimize_ddp='python_reducer', which removes "
            "DDP's hooks from the backward: nothing would be reduced; make it under 'ddp_optimizer', the "
            "default"
        )
    if ddp._delay_all_reduce_params:
        found.append(
            "ddp_model was made with delay_all_reduce_named_params, whose gradients DDP reduces "
            "in every backward: leave it out; the engine reduces all gradients once a window"
        )
    if ddp.mixed_precision is not None:
        found.append(
            "ddp_model was made with mixed_precision, which is a communication hook of its own: leave it "
            "out, and use torch.autocast or narrow parameters"
        )
    elif ddp._comm_hooks and released_state(ddp) is None:
        found.append(
            "ddp_model has a communication hook, and DDP allows only one: wrap the module again, without "
            "register_comm_hook and other engines"
        )
    return found


def released_state(ddp: DistributedDataParallel) -> HookState | None:
    """Return the hook state of a closed engine, or None; DDP keeps a hook for good."""
    states = [state for hook, state in ddp._comm_hooks if hook is comm_hook]
    return next((state for state in states if isinstance(state, HookState) and state.is_released), None)


def outside_buckets(ddp: DistributedDataParallel) -> list[str]:
    """Return messages for trained parameters that are in none of DDP's buckets."""
    reduced = {id(param) for _, param in reduced_parameters(ddp)}
    return [
        f"parameter {name!r} requires a gradient and is in none of DDP's buckets: it was added or unfrozen "
        "after DistributedDataParallel was made; wrap the complete model"
        for name, param in visible_parameters(ddp)
        if param.requires_grad and id(param) not in reduced
    ]


class OnlyDDP:
    """Refuses forwards through another DDP over the same parameters.

    Its hooks would reduce the gradients as well. A forward pre-hook; in copies and pickles of the model it is
    replaced by one that does nothing.
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
        return partial, (_check_nothing,)


def _check_nothing(*_: Any) -> None:
    pass


class ReducerDriver:
    """Drives DDP's reducer from one window to the next."""

    def __init__(self, ddp: DistributedDataParallel, state: HookState, params: Sequence[Parameter]) -> None:
        self._ddp, self._state, self._params = ddp, state, params
        self._reducer: Any = ddp.reducer
        self._index = {param: index for index, param in enumerate(params)}
        self._anchor = torch.zeros((), dtype=torch.float32, device=params[0].device, requires_grad=True)
        # Whether DDP searches the graph for parameters that a backward will not reach.
        self.finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        # Whether DDP can reduce: with static_graph it first has to learn the graph from one backward.
        self.is_ready = not ddp.static_graph
        # With static_graph: counts how often the first backward reaches each parameter. DDP counts, too, from
        # the first backward on, so it must not have seen one before `learning_graph`.
        self._reach_counts = None if self.is_ready else _ReachCounts(params)
        self._counts = [1] * len(params)  # how often a backward reaches each parameter
        # DDP's times of gradients in the running backward; a change shows that DDP was notified.
        self._stats: list[int] = []
        self._single_rank_group = _SingleRankGroup()
        # Otherwise DDP would learn the graph in each rank's first backward, and wait for the other ranks
        # there.
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = True

    def release(self) -> None:
        """Let DDP learn a static graph itself, if still unknown."""
        self._stop_counting()
        if self._ddp.static_graph:
            self._ddp._static_graph_delay_allreduce_enqueued = self.is_ready

    def stop_timing(self) -> None:
        """Let DDP time none of its iterations from now on.

        It times the first ten, and every hundredth, by events, which it reads in a later iteration. It cannot
        read events that a capture has recorded.
        """
        self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)

    def rebuild_buckets(self) -> bool:
        """Let DDP rebuild its buckets in the order of arrival, once; return whether it did."""
        rebuilt: bool = self._reducer._rebuild_buckets()
        self._ddp._has_rebuilt_buckets = self._ddp._has_rebuilt_buckets or rebuilt
        return rebuilt

    @contextmanager
    def learning_graph(self) -> Iterator[None]:
        """Let DDP learn the static graph from the body, if that is this rank's first backward.

        Nothing is reduced. DDP cannot discard a part of a backward, nor earlier backwards: after such ones
        this rank reduces past DDP.
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
                reducer._reset_state()  # DDP rebuilds no buckets while it expects gradients
            reducer._update_process_group(self._ddp.process_group)

    def prepare_for_backward(self, roots: Sequence[Tensor]) -> None:
        """Prepare DDP for a backward from `roots`, whose graph it searches if `finds_unused`."""
        self._reducer.prepare_for_forward()
        self._reducer.prepare_for_backward(list(roots) if self.finds_unused else [])
        self._stats = self._reducer.get_backward_stats()

    def mark_unreached(self, candidates: Sequence[Parameter]) -> None:
        """Mark candidates that the backward did not reach as ready, which completes DDP's buckets."""
        # A custom Function may return no gradient for a parameter that the backward reaches: `.grad` has not
        # changed, but DDP was notified.
        stats = self._reducer.get_backward_stats()
        indices = [self._index[param] for param in candidates]
        self._mark_ready([index for index in indices if stats[index] == self._stats[index]])

    def reduce_all(self) -> None:
        """Let DDP reduce the gradients in `.grad`, without a backward."""
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
        """Reduce the buckets after the first `num_sent` without DDP, and write `.grad`."""
        rest = self._reducer._get_zeros_like_grad_buckets()[num_sent:]
        for bucket in rest:
            for param, slot in slots_of(bucket):
                if param.grad is not None:
                    slot.copy_(param.grad)
        # All are launched before one is waited for: a later bucket launches the next collectives of earlier
        # ones.
        futures = [comm_hook(self._state, bucket) for bucket in rest]
        for bucket, future in zip(rest, futures, strict=True):
            future.wait()
            publish(bucket, bucket.parameters())
        # As on the other ranks: DDP broadcasts rank 0's order to all.
        self._reducer._push_all_rebuilt_params()

    def all_reduce_used_map(self) -> None:
        """Join DDP's all-reduce of its map of used parameters, int32 `[params]`."""
        if self.finds_unused:
            dist.all_reduce(self._reducer._get_local_used_map(), group=self._ddp.process_group)

    def without_published_grad(self) -> list[Parameter]:
        """Return the parameters whose result DDP does not write into `.grad`.

        With static_graph DDP treats a parameter that the first backward did not reach as unused for good.
        """
        return [param for param, times in zip(self._params, self._counts, strict=True) if not times]

    def reset(self) -> None:
        """Let DDP discard an unfinished backward, after all its reductions have completed."""
        if self.finds_unused or not self._ddp._has_rebuilt_buckets:
            self._reducer._reset_state()
            self._reducer._push_all_rebuilt_params()
        elif self.is_ready:
            # A reset would make only this rank rebuild its buckets. So DDP finishes the backward, without a
            # reduction.
            with self._state.without_reduction():
                self.prepare_for_backward([])
                self._mark_ready(range(len(self._params)))

    def _stop_counting(self) -> None:
        if self._reach_counts is not None:
            self._reach_counts.stop()
            self._reach_counts = None

    def _mark_ready(self, indices: Sequence[int]) -> None:
        """Notify DDP of parameters as they are, inside a backward: only there can DDP finish."""
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
    """Counts how often backwards reach each parameter, until `stop`."""

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
    """A process group of this rank only, whose all-reduce returns its input."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def allreduce(self, tensors: Any, *_: Any) -> dist.Work:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(tensors)
        work: dist.Work = _create_work_from_future(future)
        return work


def publish(bucket: Any, params: Sequence[Parameter]) -> None:
    """Write a reduced bucket into `.grad` of some parameters."""
    wanted = {id(param) for param in params}
    for param, value in slots_of(bucket) if wanted else ():
        if id(param) in wanted:
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(value)


def slots_of(bucket: Any) -> Iterator[tuple[Parameter, Tensor]]:
    """Yield each parameter of a bucket with its slice of the buffer, strided as in DDP."""
    flat, offset = bucket.buffer(), 0
    for param in bucket.parameters():
        yield param, flat.as_strided(param.size(), dense_strides(param), offset)
        offset += param.numel()


class _Reaches(torch.autograd.Function):
    """A zero whose graph contains every given parameter; its backward never runs."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        del ctx
        return params[0].new_zeros(())
