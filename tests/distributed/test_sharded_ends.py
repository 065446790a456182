"""Windows over FSDP2 that end early or with an exception, are not finite, or leave parameters unused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases import Inject, assert_same, me
from ranks import on_ranks
from sharded_cases import (
    KINDS,
    all_batches,
    assert_trains_a_window,
    batch,
    loss_of,
    own_batches,
    right_grads,
    sharded,
    whole_grads,
)
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import pyengine as pe
from pyengine.gradients.fsdp.exact import UnitBucket

NEWER = ("set_reduce_scatter_unused_params", "reset_iter_state")  # methods that torch 2.11 lacks


def _count_call(module: nn.Module, *_: object) -> None:
    module.calls.add_(1)
    torch.rand(1)  # as dropout would


@on_ranks(2)
def test_a_window_that_is_flushed_early_has_what_was_done():
    """A flush makes FSDP reduce in one more backward; its forward changes no buffer and no generator."""
    sync, model = sharded("nested", narrow=True)
    model.first.register_buffer("calls", torch.zeros(()))
    model.first.register_forward_hook(_count_call)
    for window in sync.windows(own_batches(3)):
        for number, data in enumerate(window):
            sync.backward(loss_of(model, data), count=3)
            if number == 1:
                break
        before = torch.random.get_rng_state()
        sync.flush()
        sync.unscale_()
        assert torch.equal(torch.random.get_rng_state(), before)
        assert model.first.calls == 2
        assert_same(whole_grads(model), right_grads(all_batches([2, 2]), 12))
        break
    assert_trains_a_window(sync, model)


@on_ranks(2)
def test_the_policy_raise_names_rank_and_micro_batch():
    rank, _ = me()
    sync, model = sharded("nested", nonfinite="raise")
    with pytest.raises(FloatingPointError) as error:
        for window in sync.windows(own_batches(3)):
            for number, data in enumerate(window):
                loss = loss_of(model, data)
                is_bad = rank == 1 and number == 2
                sync.backward(Inject.apply(loss, math.nan) if is_bad else loss, count=3)
    assert_trains_a_window(sync, model)
    assert "rank 1, micro-batch 2" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "last", "options"),
    [
        ("flat", 1, {}),
        ("nested", 2, {}),
        ("flat", 2, {"accumulator": "exact"}),
        ("nested", 1, {"defer_budget_mb": math.inf}),
        ("replicate", 1, {}),
    ],
)
@on_ranks(2)
def test_a_rank_that_leaves_between_micro_batches_is_found_out_by_all(kind, last, options):
    """Rank 0 leaves its first window after a forward, and continues with the next one."""
    rank, _ = me()
    sync, model = sharded(kind, **options)
    errors: list[str] = []
    while len(errors) < 3:
        try:
            for window in sync.windows(own_batches(3)):
                for number, data in enumerate(window):
                    loss = loss_of(model, data)
                    if (rank, number) == (0, last) and not errors:
                        raise KeyError
                    sync.backward(loss, count=3)
                sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
            break
        except (KeyError, RuntimeError) as error:
            errors.append(str(error))
            if rank and last == 2:
                with pytest.raises(RuntimeError, match="ranks are at different"):  # without a collective
                    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert_trains_a_window(sync, model)
    assert "ranks are at different points of their loops" in errors[0 if rank else -1]


def _uses_some(kind: str, *, narrow: bool) -> None:
    rank, world = me()
    sync, model = sharded(kind, narrow=narrow)
    for number, window in enumerate(sync.windows(own_batches(6))):
        for index, data in enumerate(window):
            extra = number == 0 and rank == 0 and index == 1
            sync.backward(loss_of(model, data, extra=extra), count=3)
        sync.unscale_()
        firsts = [batch(100 * r + 3 * number + k) for r in range(world) for k in range(3)]
        extras = [firsts.pop(1)] if number == 0 else []
        want = right_grads(firsts, 9 * world, extras=extras)
        assert_same(whole_grads(model), want)
        model.zero_grad()
        assert (want["sometimes"] is None) == (number == 1)


@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_a_parameter_used_once_on_one_rank_is_reduced_and_one_used_nowhere_has_none(ranks, kind, world):
    ranks(world).run(_uses_some, kind, narrow=kind in ("nested", "replicate"))


@on_ranks(2)
def test_a_rank_that_fails_behind_the_reductions_voids_the_window_everywhere():
    """Rank 1 raises in the last backward's block, after FSDP has sent everything."""
    rank, _ = me()
    sync, model = sharded("nested", accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = []
    for index in range(2):
        with contextlib.suppress(KeyError), sync.accumulate():
            with sync.micro_batch(count=3) as mb:
                loss = loss_of(model, batch(rank))
                with mb.last_backward(loss):
                    loss.backward()
                    if rank and not index:
                        raise KeyError("in the block")
            steps.append(bool(sync.step(optimizer)))
    assert steps == [[False, True], [True]][me()[0]]


@on_ranks(2)
def test_a_rank_interrupted_between_two_exact_sums_voids_the_window_everywhere():
    """Rank 1 has sent one unit's sum and sends nan for the others, so that no rank steps the window."""
    rank, _ = me()
    sync, model = sharded("nested", accumulator="exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        send, sent = UnitBucket.send, []

        def breaks(*args: Any, **kwargs: Any) -> Any:
            sent.append(args)
            if rank and len(sent) == 2:
                raise KeyboardInterrupt
            return send(*args, **kwargs)

        patch.setattr(UnitBucket, "send", breaks)
        for window in sync.windows(own_batches(6)):
            for data in window:
                with contextlib.suppress(KeyboardInterrupt):
                    sync.backward(loss_of(model, data), count=3)
            steps.append(bool(sync.step(optimizer)))
    assert steps == [False, True]
    assert_trains_a_window(sync, model)


def _is_left(kind: str, defer: str) -> list[str]:
    """Interrupt a backward on rank 1, which continues with the next window; return the caught errors."""
    rank, _ = me()
    _set_pg_timeout(timedelta(seconds=2), None)
    sync, model = sharded(kind, defer=defer)
    said: list[str] = []
    for _ in range(2):
        try:
            for window in sync.windows(own_batches(2)):
                for number, data in enumerate(window):
                    loss = loss_of(model, data)
                    if rank and not said and number == (defer == "all"):  # the first one that reduces
                        loss.register_hook(_raise)
                    sync.backward(loss, count=3)
        except (RuntimeError, MemoryError) as error:
            said.append(str(error))
    return said


def _raise(grad: torch.Tensor) -> None:
    raise MemoryError("no memory")


@pytest.mark.slow  # waits until torch gives up the collectives that ranks have left
@pytest.mark.parametrize(("kind", "defer"), [("replicate", "none"), ("nested", "all")])
def test_a_backward_that_one_rank_leaves_in_its_middle_ends_by_an_error_on_every_rank(ranks, kind, defer):
    first, second = ranks(2).run(_is_left, kind, defer)
    assert len(first) == 2 and "a collective failed" in first[1]
    assert second[0] == "no memory" and "a collective failed" in second[1]
    assert ("an exception has ended the window's last backward" in second[1]) == (defer == "all")


def _as_of_2_11(fn: Callable[..., Any], *args: Any, lacks: Sequence[str] = NEWER, **kwargs: Any) -> None:
    """Run `fn` with an FSDP2 that lacks methods, as in an older torch."""
    with pytest.MonkeyPatch.context() as patch:
        for name in lacks:
            patch.delattr(FSDPModule, name, raising=False)
        fn(*args, **kwargs)


class _Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.later = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, *, later: bool) -> torch.Tensor:
        return self.used(x) + self.later(x) if later else self.used(x)


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(2)
def test_a_unit_that_the_first_window_does_not_run_has_a_gradient_once_one_does(accumulator):
    """In a micro-batch that does not reduce, torch itself fails on a unit that was never unsharded."""
    model = _Later()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model.used, model.later, model):
        fully_shard(module, mp_policy=policy)
    sync = pe.attach(model, accumulate=2, accumulator=accumulator)
    for number, window in enumerate(sync.windows(own_batches(4))):
        for x, t in window:
            sync.backward((model(x, later=number == 1).float() * t).sum(), count=3)
        sync.unscale_()
        found = whole_grads(model)
        model.zero_grad()
        assert (found["later.weight"] is None) == (number == 0)
    assert torch.equal(found["later.weight"], found["used.weight"])


def test_an_fsdp_that_has_no_setter_for_unused_parameters_reduces_them(ranks):
    ranks(2).run(_as_of_2_11, _uses_some, "nested", narrow=True)


def _goes_on(where: str) -> None:
    """Train a window after one that an exception in a forward or a backward has ended."""
    sync, model = sharded("nested")

    def breaks(*given: Any) -> torch.Tensor:
        if where == "forward":
            raise MemoryError
        given[-1].register_hook(_raise)
        return given[-1]

    with pytest.raises(MemoryError):
        for window in sync.windows(own_batches(3)):
            for number, data in enumerate(window):
                if number == 2:
                    handle = model.second.register_forward_hook(breaks)
                sync.backward(loss_of(model, data), count=3)
    handle.remove()
    assert_trains_a_window(sync, model)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_fsdp_that_cannot_reset_itself_goes_on_after_an_exception(ranks, where):
    ranks(2).run(_as_of_2_11, _goes_on, where)


def _is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"has no set_all_reduce_hook, which the engine needs: use torch 2\.11 to 2\.15"
    ) as error:
        sharded("flat")
    assert torch.__version__ in str(error.value) and "use DistributedDataParallel" in str(error.value)


def test_an_fsdp_that_lacks_a_method_is_refused_by_name(ranks):
    ranks(1).run(_as_of_2_11, _is_refused, lacks=["set_all_reduce_hook"])
