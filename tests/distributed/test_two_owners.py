"""DDP that ignores experts, which the same engine reduces over a separate group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from cases import (
    Breaks,
    Integers,
    assert_alike,
    assert_same,
    grads,
    integers,
    me,
    mean_of_integers,
    records_of,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from window_errors import noted

import pyengine as pe

ACCUMULATE = 3


class Model(nn.Module):
    """A part that all ranks share, and an expert that only some micro-batches use."""

    def __init__(self, dense: torch.dtype, expert: torch.dtype) -> None:
        super().__init__()
        self.dense, self.expert = Integers(dense), Integers(expert)
        self.expert.never = nn.Parameter(torch.ones(2, dtype=expert))

    def forward(self, x: Tensor, t: Tensor, *, uses: bool = True) -> Tensor:
        loss = self.dense(x, t)
        return loss + self.expert(x, t) if uses else loss


def _members(which: str) -> list[int]:
    rank, world = me()
    return {"everyone": [*range(world)], "every other": [*range(rank % 2, world, 2)], "alone": [rank]}[which]


def _group(which: str) -> dist.ProcessGroup:
    _, world = me()
    if which == "everyone":
        return dist.group.WORLD
    step = 2 if which == "every other" else world
    groups = [dist.new_group([*range(first, world, step)]) for first in range(min(step, world))]
    return next(group for group in groups if dist.get_rank(group) >= 0)


def _without_experts(model: Model) -> Model:
    names = [f"expert.{name}" for name, _ in model.expert.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def _attached(
    which: str,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32),
    unused: bool = False,
    all_used: bool = False,
    **options: object,
) -> tuple[pe.Sync, DistributedDataParallel]:
    model = _without_experts(Model(*dtypes))
    model.expert.never.requires_grad_(not all_used)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5, find_unused_parameters=unused)
    axes = pe.Axes(groups={"expert.*": _group(which)})
    return pe.attach(ddp, accumulate=ACCUMULATE, axes=axes, **options), ddp


def _batches(numbers: list[int]) -> Iterator[tuple[int, int]]:
    return ((rank, k) for rank in range(me()[1]) for k in numbers)


def _uses(rank: int, k: int) -> bool:
    return (rank + k) % 3 != 1


def _want(model: Model, which: str, numbers: list[int]) -> dict[str, Tensor | None]:
    count = 3 * len([*_batches(numbers)])
    dense = [integers(100 * r + k) for r, k in _batches(numbers)]
    mine = [integers(100 * r + k) for r, k in _batches(numbers) if _uses(r, k) and r in _members(which)]
    expert = mean_of_integers(model.expert, mine, count)
    return {
        **{f"dense.{name}": grad for name, grad in mean_of_integers(model.dense, dense, count).items()},
        **{f"expert.{name}": expert.get(name) for name, _ in model.expert.named_parameters()},
    }


def _norm(which: str, numbers: list[int]) -> float:
    """Return the norm over the shared part and every expert, each counted once."""
    everybody: list[object] = [None] * me()[1]
    want = _want(Model(torch.float32, torch.float32), which, numbers)
    dist.all_gather_object(everybody, (_members(which), want))
    experts = {tuple(members): grads for members, grads in everybody}
    found = [grad for name, grad in want.items() if name.startswith("dense")]
    found += [grad for grads in experts.values() for name, grad in grads.items() if name.startswith("expert")]
    return torch.cat([grad.double().flatten() for grad in found if grad is not None]).norm().item()


WIDE, NARROW = torch.float32, torch.bfloat16
EXACT = {"accumulator": "exact"}


@pytest.mark.parametrize(
    ("which", "world", "dtypes", "options"),
    [
        ("everyone", 1, [WIDE, WIDE], {}),
        ("alone", 2, [WIDE, NARROW], {}),
        ("everyone", 2, [WIDE, WIDE], EXACT),
        ("every other", 3, [NARROW, WIDE], EXACT),
        ("every other", 3, [NARROW, NARROW], {"unused": True}),
        ("every other", 3, [WIDE, WIDE], {"nonfinite": "raise"}),
    ],
    ids=str,
)
@on_ranks()
def test_experts_beside_ddp_equal_one_big_batch(which, dtypes, options):
    rank, _ = me()
    sync, ddp = _attached(which, dtypes=dtypes, **options)
    records = records_of(sync)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0, fused=True)
    norms = []
    for number, window in enumerate(sync.windows(range(7))):  # the last one is short
        numbers = [*range(3 * number, min(3 * number + 3, 7))]
        for k in window:
            loss = ddp(*integers(100 * rank + k), uses=_uses(rank, k))
            if number == 1:
                with sync.micro_batch(count=3):
                    loss.backward()
            else:
                sync.backward(loss, count=3)
        norms.append(sync.clip_grad_norm_(1e9).item())
        sync.unscale_()
        assert_same(grads(ddp.module), _want(ddp.module, which, numbers))
        want = _norm(which, numbers)
        assert norms[-1] == pytest.approx(want, rel=1e-2 if torch.bfloat16 in dtypes else 1e-6)
        assert sync.step(optimizer)
    assert [record.count for record in records] == [9.0 * me()[1]] * 2 + [3.0 * me()[1]]
    assert_alike(norms)


@on_ranks(3)
def test_what_is_not_finite_in_one_expert_is_skipped_everywhere():
    rank, _ = me()
    sync, ddp = _attached("every other")
    records = records_of(sync)
    for window in sync.windows(range(3)):
        for k in window:
            loss = ddp(*integers(100 * rank + k))
            sync.backward(loss + ddp.module.expert.matrix.sum() * (float("inf") if rank == 2 else 1.0))
        sync.step(torch.optim.SGD(ddp.parameters(), lr=0.1))
    assert all(bool((param == 1).all()) for param in ddp.parameters())
    skipped, reason = records[0].skipped, records[0].reason
    assert skipped and "'expert.matrix'" in reason


@pytest.mark.parametrize(("at", "accumulator"), [(1, "fp32"), (2, "fp32"), (2, "exact")])
@on_ranks(3)
def test_a_failure_is_refused_in_an_earlier_backward_and_voids_the_window_of_both_in_the_last(
    at, accumulator
):
    """Rank 2 fails in backward `at` of the second of three windows."""
    rank, _ = me()
    sync, ddp = _attached("every other", accumulator=accumulator)
    records = records_of(sync)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    errors: list[str] = []
    for number, window in enumerate(sync.windows(range(9))):
        with noted(errors, sync):
            for k in window:
                Breaks.now = (number, rank, k % 3) == (1, 2, at)
                with contextlib.suppress(MemoryError):
                    sync.backward(Breaks.apply(ddp(*integers(100 * rank + k), uses=_uses(rank, k))), count=3)
                Breaks.now = False
            if number != 1:
                sync.unscale_()
                numbers = [*range(3 * number, 3 * number + 3)]
                assert_same(grads(ddp.module), _want(ddp.module, "every other", numbers))
            sync.step(optimizer)
    first, refused, last = errors
    assert first == last == ""
    reasons = [record.reason for record in records if record.skipped]
    if at == 1:
        assert "rank 2: micro-batch 1 was left by an exception" in refused and not reasons
    else:
        assert not refused
        assert reasons == ["rank 2 gave up the window: MemoryError('no room for a gradient')"]


@pytest.mark.parametrize(("which", "accumulator"), [("everyone", "fp32"), ("every other", "exact")])
@on_ranks(3)
def test_a_window_ended_early_on_one_rank_is_sent_to_the_right_buckets(which, accumulator):
    rank, _ = me()
    sync, ddp = _attached(which, all_used=True, accumulator=accumulator)
    numbers = {1: [0, 1]}.get(rank, [0, 1, 2])
    for k in numbers:
        with sync.accumulate():
            sync.backward(ddp(*integers(100 * rank + k), uses=_uses(rank, k)), count=3)
    if rank == 1:
        sync.flush()
    sync.unscale_()
    total = 3 * 8
    batches = [integers(100 * r + k) for r in range(3) for k in range(3) if (r, k) != (1, 2)]
    got = {name: p.grad for name, p in ddp.module.dense.named_parameters()}
    assert_same(got, mean_of_integers(ddp.module.dense, batches, total))


@on_ranks(3)
def test_experts_get_the_values_of_their_groups_first_rank():
    rank, _ = me()
    model = _without_experts(Model(WIDE, WIDE))
    nn.init.constant_(model.expert.matrix, float(rank))
    ddp = DistributedDataParallel(model)
    group = _group("every other")
    sync = pe.attach(ddp, axes=pe.Axes(groups={"expert.*": group}))
    with pytest.raises(ValueError, match="belongs to an engine"):
        pe.GradSync(model.expert)
    sync.close()
    nn.init.constant_(model.expert.never, float(rank))
    pe.attach(ddp)  # without a group, experts belong to the caller
    # The first ranks of the groups are 0 and 1.
    assert (model.expert.matrix[0, 0].item(), model.expert.never[0].item()) == (rank % 2, rank)


REFUSED = {
    "not ignored": "axes.groups gives 'expert.matrix' a separate group, but DDP sums it",
    "both": "axes.groups gives 'dense.matrix' a separate group",
    "nothing": "axes.groups['experts.*'] matches no parameter on any rank",
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(3)
def test_what_ddp_reduces_has_no_other_group(case):
    model = Model(WIDE, WIDE)
    if case != "not ignored":
        _without_experts(model)
    patterns = {"not ignored": "expert.*", "nothing": "experts.*", "both": "*matrix"}
    axes = pe.Axes(groups={patterns[case]: _group("every other")})
    with pytest.raises(ValueError) as error:
        pe.attach(DistributedDataParallel(model), axes=axes)
    assert REFUSED[case] in str(error.value)


@on_ranks(2)
def test_a_bare_backward_into_an_expert_is_refused_everywhere():
    rank, _ = me()
    sync, ddp = _attached("alone")
    with pytest.raises(ValueError) as error:
        for window in sync.windows(range(3)):
            for k in window:
                if (rank, k) == (1, 1):
                    ddp.module.expert(*integers(7)).backward()
                sync.backward(ddp(*integers(k)))
            sync.step(torch.optim.SGD(ddp.parameters(), lr=0.1))
    message = str(error.value)
    assert message.startswith("rank 1: ") and "the gradient of 'expert.matrix'" in message


@on_ranks(4)
def test_frozen_parameters_of_a_stage_do_not_shift_the_norm():
    """DDP has no bucket for frozen parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    sync = pe.attach(ddp, device_mesh=mesh, axes=pe.Axes(replicate="dp", shard="pp"))
    with sync.accumulate():
        sync.backward(ddp(torch.ones(1, 2)).sum())
    # Two stages with gradients of four 2s and two 1s each.
    assert sync.grad_norm().item() == pytest.approx(36**0.5)
