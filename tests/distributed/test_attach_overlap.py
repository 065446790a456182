"""Under attach gradients are summed, and norms read, inside the backward, which waits for no other rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from datetime import timedelta
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import FutureWork, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.comm import TorchDist
from pyengine.gradients import bucket
from pyengine.gradients.ddp.bucket_norms import BucketNorms
from pyengine.gradients.used_anywhere import UsedAnywhere

LAYERS, ACCUMULATE = 4, 3


def _layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(LAYERS)])


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@on_ranks(1)
def test_gradients_of_earlier_micro_batches_are_summed_while_the_cache_has_them(options):
    model = _layers(torch.bfloat16)
    ddp = DistributedDataParallel(model, **options)
    sync = pe.attach(ddp, accumulate=ACCUMULATE)
    found: list[list[bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "GROUP_BYTES", 1)  # a group a layer
        model[0].weight.register_post_accumulate_grad_hook(
            lambda _: found.append([layer.weight.grad is not None for layer in model[1:]])
        )
        for window in sync.windows(torch.ones(2 * ACCUMULATE, 1, 8, dtype=torch.bfloat16)):
            for x in window:
                sync.backward(ddp(x).sum())
            sync.unscale_()
            ddp.zero_grad()
    # Those of the last micro-batch stay until DDP hands out their bucket.
    window = [[False] * (LAYERS - 1)] * (ACCUMULATE - 1) + [[True] * (LAYERS - 1)]
    assert found == window * 2


@on_ranks(2)
def test_sums_move_into_views_of_ddps_buckets_in_one_call():
    model = _layers(torch.float32)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    sync = pe.attach(ddp, accumulate=ACCUMULATE)
    sync._engine.reducer._moves_sums = True  # as on an accelerator
    xs, moved = torch.randn(3 * ACCUMULATE, 4, 8), []
    weight, places = model[0].weight, []
    weight.register_hook(lambda _: places.append(None if weight.grad is None else weight.grad.data_ptr()))

    def copy(into: list[Tensor], sums: list[Tensor]) -> None:
        # The buckets have an order of their own.
        moved.append({float(grad.sum()) for grad in sums} == {float(grad.sum()) for grad in before})
        for one, other in zip(into, sums, strict=True):
            one.copy_(other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", copy)
        for number, window in enumerate(sync.windows(xs)):
            for x in window:
                before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                sync.backward(ddp(x).sum(), count=4)
            sync.unscale_()
            place = places[-1]
            views, want = [p.grad for p in model.parameters()], [torch.zeros(8, 8)] * LAYERS
            for x in xs[ACCUMULATE * number : ACCUMULATE * (number + 1)]:
                grads = torch.autograd.grad(model(x).sum() / (4 * ACCUMULATE), list(model.parameters()))
                want = [one + other for one, other in zip(want, grads, strict=True)]
            torch.testing.assert_close(views, want)
            model.zero_grad()
    # DDP rebuilds its buckets behind the first window; the second's end is the first that knows them.
    assert moved == [True]
    assert place == views[0].data_ptr()  # where the last backward has accumulated


@pytest.mark.parametrize(
    ("wire", "accumulator", "options"),
    [
        (pe.wire.BF16(), "native", {"gradient_as_bucket_view": True}),
        (pe.wire.Int8(), "native", {"static_graph": True}),
        (pe.wire.FP32(), "exact", {"find_unused_parameters": True}),
    ],
    ids=str,
)
@on_ranks(2)
def test_the_norm_of_every_bucket_is_read_when_the_bucket_is_reduced(wire, accumulator, options):
    copy_if_complete, are_complete = BucketNorms.copy_if_complete, []

    def noted(self: BucketNorms, final: Any) -> bool:
        are_complete.append(copy_if_complete(self, final))
        return are_complete[-1]

    model = _layers(torch.float32)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)
    sync = pe.attach(ddp, accumulate=ACCUMULATE, wire=wire, accumulator=accumulator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketNorms, "copy_if_complete", noted)
        for window in sync.windows(torch.randn(3 * ACCUMULATE, 4, 8)):
            for x in window:
                sync.backward(ddp(x).square().mean())
            norm = sync.clip_grad_norm_(math.inf)
            sync.unscale_()
            of_grads = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            assert float(norm) == pytest.approx(float(of_grads), rel=1e-6)  # torch's is summed in float32
            ddp.zero_grad()
    assert are_complete == [True] * 3


@on_ranks(1)
def test_a_gradient_that_comes_again_inside_a_backward_is_summed_too():
    """The group of the gradient was complete after the first one."""
    model = _layers(torch.bfloat16)
    ddp = DistributedDataParallel(model)
    sync = pe.attach(ddp, accumulate=ACCUMULATE)
    weight = model[0].weight
    xs = torch.randn(ACCUMULATE, 1, 8).bfloat16()

    def again(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            weight.sum().backward()
        return grad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "GROUP_BYTES", 1)
        for window in sync.windows(xs):
            for place, x in enumerate(window):
                loss = ddp(x).sum()
                if place < ACCUMULATE - 1:  # in the last one DDP itself takes each gradient once
                    loss.register_hook(again)
                sync.backward(loss)
            sync.unscale_()
    want = torch.zeros(8, 8, dtype=torch.float64)
    twin = _layers(torch.bfloat16)
    for x in xs:
        twin.zero_grad()
        twin(x).sum().backward()
        want += twin[0].weight.grad.double()
    got, want = weight.grad.double(), (want + ACCUMULATE - 1) / ACCUMULATE
    assert torch.allclose(got, want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_used_flags_travel_while_the_last_bucket_does(dtype):
    """The buckets arrive when the used flags are sent, or, much later, when the clock says so."""
    model = _layers(dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    sync = pe.attach(ddp, accumulate=1)
    held: list[tuple[Future[list[Tensor]], Tensor]] = []
    released: list[str] = []

    def let_go(why: str) -> None:
        waiting, held[:] = list(held), []
        if waiting:
            released.append(why)
        for future, flat in waiting:
            future.set_result([flat])

    def hold(self: TorchDist, flat: Tensor) -> object:
        if flat.dtype == torch.float64:  # the header
            return all_reduce(self, flat)
        held.append((Future(), flat))
        return FutureWork(held[-1][0])

    def flags(self: UsedAnywhere, used: Sequence[bool], **known: bool) -> object:
        let_go("flags")
        return all_reduce_flags(self, used, **known)

    all_reduce, all_reduce_flags = TorchDist.all_reduce, UsedAnywhere.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchDist, "all_reduce", hold)
        patch.setattr(UsedAnywhere, "all_reduce", flags)
        for window in sync.windows(torch.ones(2, 1, 8, dtype=dtype)):
            for x in window:
                clock = Timer(5.0, let_go, ["clock"])
                clock.start()
                sync.backward(ddp(x).sum())
                clock.cancel()
            sync.unscale_()
            ddp.zero_grad()
    assert released == ["flags", "flags"]


def _comes_late(dtype: torch.dtype, *, fails: bool) -> tuple[bool, list[bool], Tensor]:
    """Rank 1 sends the third window's header when rank 0's backward has come to its last gradient."""
    rank, _ = me()
    model = _layers(dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # a bucket a layer
    sync, store = pe.attach(ddp, accumulate=1), dist.distributed_c10d._get_default_store()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    came, stepped = True, []

    def announce(_: Tensor) -> None:
        if (rank, sync.window) == (0, 2):
            store.set("the last gradient", "came")
            if fails:
                raise MemoryError

    model[0].weight.register_post_accumulate_grad_hook(announce)
    for number in range(4):
        x = torch.full((1, 8), 1.0 + rank + number, dtype=dtype)
        with contextlib.suppress(MemoryError), sync.accumulate():
            if (rank, number) == (1, 2):
                try:
                    store.wait(["the last gradient"], timedelta(seconds=10))
                except RuntimeError:
                    came = False
            sync.backward(ddp(x).sum())
        failed = fails and (rank, number) == (0, 2)
        stepped.append(not failed and bool(sync.step(optimizer)))
    return came, stepped, torch.stack([layer.weight.detach().clone() for layer in model])


@pytest.mark.parametrize(("dtype", "fails"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_backward_does_not_wait_for_a_rank_that_is_late_with_its_header(ranks, dtype, fails):
    (_, *first), (came, *second) = ranks(2).run(_comes_late, dtype, fails=fails)
    assert came and first[0] == second[0] == [True, True, not fails, True]
    assert torch.equal(first[1], second[1])
