"""Gradients that two owners reduce: DDP and the engine's buckets.

The engine's buckets reduce parameters that DDP ignores and that have a process group of their own, for
example experts. The owners do not wait for each other: the engine's buckets use process groups that DDP does
not use. Both share the window's divisor, norm and verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.gradients.base import Reducer, Residuals
from pyengine.gradients.bucket import Accumulator
from pyengine.gradients.ddp.reducer import DDPReducer
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.own import BucketReducer, Groups
from pyengine.gradients.settings import Settings
from pyengine.window.header import Header


def _of_both(name: str) -> Any:
    """Return the method that calls the method `name` of both owners."""

    def call(self: TwoOwners, *args: Any, **kwargs: Any) -> None:
        for owner in self._owners:
            getattr(owner, name)(*args, **kwargs)

    return call


class TwoOwners(Reducer):
    """Gradients that DDP owns, and others in the engine's own buckets.

    Args:
        ddp: owns the first parameters.
        specs, params: descriptions and parameters of the others, in registration order.
        groups: the ranks over which the others are summed, over transports that nothing else uses.
        counted: by parameter, DDP's first.
    """

    overlaps = True

    def __init__(
        self,
        ddp: DDPReducer,
        specs: Sequence[ParamSpec],
        params: Sequence[Parameter],
        *,
        groups: Groups,
        counted: Sequence[bool] | None,
        settings: Settings,
        terms: Terms,
    ) -> None:
        self._ddp, self._num_ddp = ddp, len(ddp.params)
        # The bucket reducer gets DDP's parameters as frozen ones, so that both owners use the same indices.
        ddp_specs = [
            ParamSpec(name, tuple(param.shape), param.dtype, requires_grad=False)
            for name, param in zip(ddp.names, ddp.params, strict=True)
        ]
        self._own = own = BucketReducer(
            [*ddp_specs, *specs], [*ddp.params, *params], groups=groups, settings=settings, terms=terms
        )
        self._owners: tuple[Reducer, Reducer] = ddp, own
        self.names, self.params, self.counted = own.names, own.params, counted
        both = [*ddp.residuals.owners, *own.residuals.owners]
        self.residuals = Residuals(both, own.residuals.wire)

    open = _of_both("open")
    begin = _of_both("begin")
    collect = _of_both("collect")
    give_up = _of_both("give_up")
    finish = _of_both("finish")
    load = _of_both("load")
    release = _of_both("release")

    def local_params(self) -> Sequence[Parameter]:
        return self._own.local_params()

    @property
    def has_replaced_grad(self) -> bool:
        return self._ddp.has_replaced_grad

    def groups_of_params(self) -> tuple[Sequence[Comm], Sequence[int]]:
        comms, _ = self._ddp.groups_of_params()
        own, group_of = self._own.groups_of_params()
        others = [len(comms) + group for group in group_of[self._num_ddp :]]
        return [*comms, *own], [*[0] * self._num_ddp, *others]

    def buckets(self) -> Iterator[Accumulator]:
        yield from self._ddp.buckets()
        yield from self._own.buckets()

    def written_outside_grad(self) -> Sequence[int]:
        return self._own.written_outside_grad()

    def clear_written_outside_grad(self) -> None:
        self._own.clear_written_outside_grad()

    def before_forward(self, *, syncs: bool) -> None:
        self._ddp.before_forward(syncs=syncs)

    def before_retried_forward(self) -> None:
        self._ddp.before_retried_forward()

    def before_header(self) -> None:
        self._ddp.before_header()

    @contextmanager
    def add(self) -> Iterator[None]:
        with self._own.add(), self._ddp.add():
            yield

    @contextmanager
    def leave_in_grad(self) -> Iterator[None]:
        with self._own.leave_in_grad(), self._ddp.leave_in_grad():
            yield

    def reduce(self, header: Header) -> None:
        self._own.prepare(header)
        self._ddp.reduce(header)
        self._own.launch_rest()

    @contextmanager
    def overlap(self, header: Header, roots: Sequence[Tensor]) -> Iterator[None]:
        with self._own.overlap(header, roots), self._ddp.overlap(header, roots):
            yield

    def load_problems(self) -> list[str]:
        return self._ddp.load_problems()
