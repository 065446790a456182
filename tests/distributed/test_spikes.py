"""`SpikePolicy`: spikes on one rank and in one parameter, before the median is known, and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import assert_alike, engine, me, records_of
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe


class Pair(nn.Module):
    """Two parameters whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calm, self.wild = (nn.Parameter(torch.zeros(4)) for _ in range(2))

    def forward(self, calm: Tensor, wild: Tensor) -> Tensor:
        return (self.calm * calm).sum() + (self.wild * wild).sum()


def _policy(sync: pe.Sync, **options: Any) -> list[pe.StepRecord]:
    sync.measure(pe.SpikePolicy(**{"factor": 3.0, "window": 3} | options))
    return records_of(sync)


def _windows(sync: pe.Sync, forward: nn.Module, wild: list[float], *, of: int = 0, calm: float = 1.0) -> None:
    """Train a window for each number in `wild`, which is the input of rank `of`; the others' input is 1."""
    rank, world = me()
    optimizer = torch.optim.SGD(forward.parameters(), lr=1.0)
    for number in wild:
        with sync.accumulate(last=True):
            value = number if rank == of % world else 1.0
            sync.backward(forward(torch.full((4,), calm), torch.full((4,), value)), count=1)
        sync.step(optimizer)
    sync.synchronize()


@pytest.mark.parametrize(
    ("kind", "world"), [("own", 1), ("own", 3), ("own-native", 2), ("own-exact", 2), ("attach", 2)]
)
@on_ranks()
def test_a_spike_on_one_rank_in_one_parameter_is_skipped_on_all(kind):
    _, world = me()
    model = Pair()
    sync, forward = engine(kind, model, accumulate=1)
    records = _policy(sync)
    with pytest.warns(
        UserWarning, match=r"window 3: the step was skipped on every rank: skipped by SpikePolicy"
    ):
        _windows(sync, forward, [1.0, 1.0, 1.0, 100.0, 1.0], of=1)
    assert [record.skipped for record in records] == [False, False, False, True, False]
    assert model.wild.tolist() == [-4.0] * 4
    spike = records[3].spike
    wild = (100.0 + world - 1) / world
    assert (spike.norm, spike.median) == (pytest.approx((4 + 4 * wild**2) ** 0.5), pytest.approx(8**0.5))
    name = "module.wild" if "wild" not in spike.params else "wild"
    assert spike.params == {name: pytest.approx(wild)}
    assert f"{wild:.3g} times its median)" in records[3].reason
    assert all(record.spike is None and not record.reason for record in records if not record.skipped)
    assert_alike([(record.skipped, record.reason, record.grad_norm) for record in records])


@on_ranks(1)
def test_a_spike_may_be_small():
    sync, forward = engine("own", Pair(), accumulate=1)
    records = _policy(sync)
    _windows(sync, forward, [1e-3] * 3 + [1e-1], calm=1e-3)
    assert [record.spike is not None for record in records] == [False, False, False, True]


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_spike_is_clipped_to_the_limit(kind):
    model = Pair()
    sync, forward = engine(kind, model, accumulate=1)
    records = _policy(sync, action="clip")
    _windows(sync, forward, [1.0] * 3)
    before = model.wild.detach().clone()
    _windows(sync, forward, [99.0])
    limit, norm = 3 * 8**0.5, (4 + 4 * 50.0**2) ** 0.5
    torch.testing.assert_close(before - model.wild, torch.full((4,), 50.0 * limit / norm), rtol=1e-6, atol=0)
    record = records[-1]
    assert (record.skipped, record.grad_norm) == (False, pytest.approx(norm))
    assert record.spike.params == {name: pytest.approx(50.0) for name in record.spike.params}
    assert record.reason.startswith(
        "clipped by SpikePolicy(factor=3.0, window=3, action='clip'): the gradient"
    )
    _windows(sync, forward, [1.0])
    assert records[-1].spike is None and sync.grad_norm().item() == pytest.approx(8**0.5)


NO, SPIKE, INF = (False, False), (True, True), (True, False)  # whether it was skipped, whether it was a spike


@pytest.mark.parametrize(
    ("window", "wild", "want"),
    [
        (3, [1e6, 1.0, 1e5], [NO] * 3),  # the median is not known yet
        (3, [1.0] * 3 + [100.0] * 4, [NO] * 3 + [SPIKE] * 2 + [NO] * 2),  # the median follows
        # Windows with inf are not included in the median.
        (2, [1.0, float("inf"), 100.0, 1.0, 1.0, 400.0], [NO, INF, NO, NO, NO, SPIKE]),
    ],
)
@on_ranks(2)
def test_the_median_is_of_the_last_finite_windows(window, wild, want):
    sync, forward = engine("own", Pair(), accumulate=1)
    records = _policy(sync, window=window)
    _windows(sync, forward, wild)
    assert [(record.skipped, record.spike is not None) for record in records] == want


@on_ranks(2)
def test_a_resumed_policy_knows_the_norms_before():
    sync, forward = engine("own", Pair(), accumulate=1)
    _policy(sync)
    _windows(sync, forward, [1.0] * 3)
    state = sync.state_dict()
    sync.close()
    sync, forward = engine("own", Pair(), accumulate=1)
    records = _policy(sync)
    sync.load_state_dict(state)
    with pytest.warns(UserWarning, match="skipped by SpikePolicy"):
        _windows(sync, forward, [100.0])
    assert records[0].skipped and records[0].step == 3
    sync.close()
    sync, _ = engine("own", Pair(), accumulate=1)
    _policy(sync, window=4)
    with pytest.raises(ValueError, match=r"measured\['spike'\] of \[10\] numbers.*pass the same window"):
        sync.load_state_dict(state)


@on_ranks(2)
def test_a_spike_neither_raises_nor_changes_a_loss_scale():
    model = Pair()
    sync, forward = engine("own", model, accumulate=1, nonfinite="raise")
    sync.scaler = pe.GradScaler("cpu", init_scale=8.0)
    records = _policy(sync)
    _windows(sync, forward, [1.0] * 3 + [100.0])
    assert records[-1].skipped and records[-1].spike.norm == records[-1].grad_norm
    assert sync.scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.0}, r"SpikePolicy\(factor=1\.0\): expected a number above 1"),
        ({"window": 0}, r"SpikePolicy\(window=0\): expected a whole number of windows"),
        ({"action": "stop"}, r"SpikePolicy\(action='stop'\): expected \"skip\" or \"clip\""),
    ],
)
@on_ranks(2)
def test_wrong_arguments_are_refused_on_every_rank(options, message):
    with pytest.raises(ValueError, match=message):
        pe.GradSync(Pair()).measure(pe.SpikePolicy(**{"factor": 3.0} | options))
