"""Windows that run as a graph on a simulated device: same bits, records and skipped steps as without a graph.

Tests on a GPU are in tests/distributed/test_cuda_capture.py.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from recorded_graph import recorded_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.gradients.ddp import reducer as ddp_reducer
from pyengine.ops import capture

WINDOWS, ACCUMULATE = 12, 3


def _model(dtype: torch.dtype = torch.float32, *, norms: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if norms else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def _batches(rank: int, windows: int = WINDOWS, *, bad: int | None = None) -> list[Any]:
    """Return the micro-batches of a rank; the last window is short, and rank 1 has one window less."""
    made = torch.Generator().manual_seed(rank)
    num = windows * ACCUMULATE - 1 - ACCUMULATE * (rank == 1)
    batches = [(torch.randn(4, 6, generator=made), torch.randn(4, 3, generator=made)) for _ in range(num)]
    if bad is not None and rank == 0:
        batches[bad * ACCUMULATE][0][0, 0] = torch.nan
    return batches


def _run(
    *,
    captured: bool,
    bad: int | None = None,
    schedules: bool = False,
    scales: bool = False,
    dtype: torch.dtype = torch.float32,
    resumes_at: int | None = None,
    norms: bool = False,
    windows: int = WINDOWS,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[Any], Any]:
    """Train with GradSync, or with a DDP with the arguments `ddp`; return the state, records and `step`."""
    model: nn.Module = _model(dtype, norms=norms)
    if ddp is None:
        sync = pe.GradSync(model, accumulate=ACCUMULATE, **options)
    else:
        model = DistributedDataParallel(model, **ddp)
        sync = pe.attach(model, accumulate=ACCUMULATE, **options)
    lr = torch.tensor(0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedules else None
    if scales:
        sync.scaler = pe.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    records: list[Any] = []
    sync.on_step(records.append)

    def train_window(batches: list[Any]) -> None:
        for x, y in batches:
            loss = (model(x.to(dtype)) - y).square().sum()
            sync.backward(loss, count=len(x))
        sync.clip_grad_norm_(0.5)
        sync.step(optimizer, scheduler)

    step = sync.capture(train_window) if captured else lambda window: train_window(list(window))
    torch.manual_seed(1)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    sums: list[float] = []
    for number, window in enumerate(sync.windows(_batches(rank, windows, bad=bad))):
        step(window)
        sums.append(float(sum(param.grad.double().sum() for param in model.parameters())))
        if number % 3 == 0:
            optimizer.zero_grad()  # no window needs this
        if number == resumes_at:
            sync.synchronize()
            sync.load_state_dict(sync.state_dict())
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # new memory: captured again
    sync.close()
    seen = [
        (r.step, r.micro_batches, r.count, r.loss, r.grad_norm, r.skipped, r.collectives, r.bytes_on_wire)
        for r in records
    ]
    state = [tensor.clone() for tensor in model.state_dict().values()]
    return state, [*seen, *sums], step


VIEWS = {"gradient_as_bucket_view": True}
CASES = {
    "schedule": {"schedules": True, "bad": 6},
    "first step skipped": {"bad": 0},
    "scaler": {"scales": True, "bad": 8},
    "bf16": {"dtype": torch.bfloat16, "wire": "bf16"},
    "int8+ef": {"wire": pe.wire.ErrorFeedback(pe.wire.Int8())},
    "exact": {"accumulator": pe.Exact(micro_batches=16)},
    "resumed": {"resumes_at": 7},
    "norms": {"norms": True},
    "DDP": {"ddp": {}},
    "DDP, nan": {"ddp": VIEWS, "schedules": True, "bad": 6},
    "DDP, scaler": {"ddp": VIEWS, "scales": True, "bad": 8},
    "DDP, bf16": {"ddp": {}, "dtype": torch.bfloat16, "wire": "bf16"},
    "DDP, int8+ef": {"ddp": VIEWS, "wire": pe.wire.ErrorFeedback(pe.wire.Int8())},
    "DDP, exact": {"ddp": VIEWS, "accumulator": pe.Exact(micro_batches=16)},
    "DDP, resumed": {"ddp": VIEWS, "resumes_at": 7},
    "DDP, static graph": {"ddp": VIEWS | {"static_graph": True}},
    "DDP, unused": {"ddp": {"find_unused_parameters": True}},
    "DDP, BatchNorm": {"ddp": VIEWS, "norms": True},
}
_OF_TWO = ("int8+ef", "norms", "DDP, nan", "DDP, int8+ef", "DDP, BatchNorm")
_OF_THREE = ("exact", "scaler", "DDP, exact")


# Every case runs on one rank; cases of communication also on two or three ranks, one of which has less data.
@pytest.mark.parametrize(
    ("world", "case"),
    [*((1, case) for case in CASES), *((2, case) for case in _OF_TWO), *((3, case) for case in _OF_THREE)],
)
@on_ranks()
def test_a_captured_window_has_the_bits_of_one_that_is_not(world: int, case: str) -> None:
    options = dict(CASES[case])
    with recorded_device(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*step was skipped")
        expected, records, _ = _run(captured=False, **options)
        found, others, step = _run(captured=True, **options)
    assert all(map(torch.equal, found, expected))
    assert repr(others) == repr(records)  # as text, in which nan equals nan
    assert not step.problems
    assert step.num_captured >= 1
    assert step.num_replayed >= 4


def _step(model: nn.Module, sync: pe.Sync, optimizer: Any, x: torch.Tensor) -> None:
    sync.backward(model(x).sum(), count=len(x))
    sync.step(optimizer)


def _captured(
    train: Any = _step,
    *,
    rows: Any = (2,) * 6,
    tensor: type[torch.Tensor] = torch.Tensor,
    before: Any = None,
    audit_every: int = 0,
    **options: Any,
) -> tuple[Any, nn.Module]:
    """Capture windows of one micro-batch each; `rows` are the sizes of the micro-batches.

    `train` trains a window, after a call of `before(number, model, optimizer)`.
    """
    with recorded_device():
        model = _model()
        sync = pe.GradSync(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = sync.capture(lambda batches: train(model, sync, optimizer, batches[0]))
        if audit_every:
            sync.audit(every=audit_every)
        batches = [torch.full((num, 6), float(number)).as_subclass(tensor) for number, num in enumerate(rows)]
        for number, window in enumerate(sync.windows(batches)):
            if before is not None:
                before(number, model, optimizer)
            step(window)
        sync.synchronize()
        sync.close()
    return step, model


class _Elsewhere(torch.Tensor):
    """A tensor that stands for one on a different device than the model."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def to(self, device: torch.device) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_every_window_gets_its_tensors_on_the_device() -> None:
    given: list[type] = []

    def train(model, sync, optimizer, x):
        given.append(type(x))
        _step(model, sync, optimizer, x)

    step, _ = _captured(train, tensor=_Elsewhere)
    assert step.num_replayed and not step.problems
    assert set(given) == {torch.Tensor}


def _reads_the_loss(model, sync, optimizer, x):
    loss = model(x).sum()
    float(loss)
    sync.backward(loss)
    sync.step(optimizer)


def _picks_rows(model, sync, optimizer, x):
    sync.backward(model(x[x[:, 0] > -9]).sum())
    sync.step(optimizer)


def _draws_by_place(model, sync, optimizer, x):
    with pe.micro_batch_rng(1, step=sync.window, index=0):
        sync.backward(model(x).sum())
    sync.step(optimizer)


_BY_WINDOW = [torch.ones(2, 6), torch.ones(4, 6)]


def _grows(model, sync, optimizer, x):
    sync.backward(model(_BY_WINDOW[sync.window % 2]).sum())
    sync.step(optimizer)


def _depends_on_the_window(model, sync, optimizer, x):
    sync.backward((model(x) * (1.0 + sync.window)).sum())
    sync.step(optimizer)


def _runs_more_now_and_then(model, sync, optimizer, x):
    loss = model(x).sum()
    sync.backward(loss if sync.window % 2 else loss.neg().neg())
    sync.step(optimizer)


def _of_the_host(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int32)  # on the host for `recorded_device`


def _counts_by_window(model, sync, optimizer, x):
    sync.backward(model(x).sum(), count=1 + sync.window)
    sync.step(optimizer)


def _counts_by_tensor(model, sync, optimizer, x):
    sync.backward(model(x).sum(), count=_of_the_host(1 + sync.window))
    sync.step(optimizer)


def _notes_a_loss(model, sync, optimizer, x):
    with sync.micro_batch() as mb:
        mb.backward(model(x).sum())
        mb.loss = _of_the_host(1)
    sync.step(optimizer)


def _steps_by_for_loop(model, sync, optimizer, x):
    sync.backward(model(x).sum())
    sync.step(torch.optim.Rprop(model.parameters()))


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (_reads_the_loss, r"test_capture.py:\d+: _local_scalar_dense makes the host wait"),
        (_picks_rows, r"test_capture.py:\d+: index makes the host wait"),
        (_draws_by_place, "micro_batch_rng seeds on the host"),
        (_grows, r"test_capture.py:\d+: a shape in \w+ is \(2, 6\), but was \(4, 6\)"),
        (_depends_on_the_window, r"test_capture.py:\d+: a host value in mul is 3.0, but was 2.0"),
        (_runs_more_now_and_then, r"test_capture.py:\d+: \w+ where the previous window ran \w+"),
        (_counts_by_window, "count of micro-batch 0 is 3 on the host, .*: pass it"),
        (_counts_by_tensor, "count of micro-batch 0 is 3 on the host, .*: pass it"),
        (_notes_a_loss, "loss of micro-batch 0 is on the host: pass it"),
        (_steps_by_for_loop, "the step of Rprop waits for the host"),
    ],
)
def test_what_breaks_a_capture_is_named_and_the_windows_run_without(train, says):
    with pytest.warns(UserWarning, match=says):
        step, _ = _captured(train)
    assert (step.num_captured, step.num_replayed, step.num_eager) == (0, 0, 6)
    assert len(step.problems) == 1


def test_a_stochastic_wire_is_not_captured():
    wire = pe.wire.Int8(rounding="stochastic")
    with pytest.warns(UserWarning, match="a stochastic wire draws different random numbers"):
        _captured(wire=wire)


def test_autocast_around_the_window_is_refused():
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="enter autocast inside"):
        _captured()


def test_a_capture_that_fails_runs_the_window_without():
    runs = []

    def fails(model, sync, optimizer, x):
        runs.append(capture.is_capturing())
        _step(model, sync, optimizer, x)
        if runs[-1]:
            raise OSError("no graph today")

    with pytest.warns(UserWarning, match="its capture failed: no graph today"):
        step, model = _captured(fails)
    _, twin = _captured()  # its windows 4 to 6 run as a graph
    assert runs == [False] * 3 + [True] + [False] * 3
    assert step.num_eager == 6
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_window_that_is_not_stepped_is_an_error():
    with pytest.raises(RuntimeError, match=r"without calling sync\.step"):
        _captured(lambda model, sync, optimizer, x: sync.backward(model(x).sum()))


def test_a_learning_rate_of_the_host_is_captured_again_where_it_changes():
    def schedule(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 if number < 5 else 0.05

    with pytest.warns(UserWarning, match=r"lr of SGD is 0.05 but was 0.1 .*make it a tensor"):
        step, _ = _captured(rows=(2,) * 10, before=schedule)
    assert (step.num_captured, step.num_replayed, step.num_eager) == (2, 2, 6)


def _moves(number, model, optimizer):
    if number == 6:
        model.double().float()


def _clips_three_rows(model, sync, optimizer, x):
    sync.backward(model(x).sum(), count=len(x))
    if len(x) == 3:
        sync.clip_grad_value_(1.0)
    sync.step(optimizer)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"rows": (2,) * 12, "before": _moves}, (2, 4, 6)),
        # The audit checks windows 0, 6 and 12, and reads its result in the next window.
        ({"rows": (2,) * 14, "audit_every": 6}, (1, 5, 8)),
        # What ranks compare about the previous window then has a different length.
        ({"train": _clips_three_rows, "rows": (2, 2, 2, 2, 2, 3, 2, 2)}, (1, 2, 5)),
    ],
    ids=["a model's memory has moved", "an audit is due", "the window before was clipped otherwise"],
)
def test_a_window_that_the_graph_does_not_fit_runs_without_or_is_captured_again(options, numbers):
    step, _ = _captured(**options)
    assert (step.num_captured, step.num_replayed, step.num_eager) == numbers


def test_a_bare_backward_between_windows_is_found():
    def train_past(number, model, optimizer):
        if number == 6:
            model(torch.ones(1, 6)).sum().backward()

    with pytest.raises(ValueError, match="was written to between windows"):
        _captured(rows=(2,) * 9, before=train_past)


def test_a_loss_scale_is_updated_once_by_a_window_that_ran_as_a_graph():
    with recorded_device():
        model = _model()
        sync, optimizer = pe.GradSync(model), torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        sync.scaler = scaler = pe.GradScaler("cpu", growth_interval=100)
        step = sync.capture(lambda batches: _step(model, sync, optimizer, batches[0]))
        for window in sync.windows([torch.ones(2, 6)] * 6):
            step(window)
        before = scaler.state_dict()
        sync.abandon()
        assert scaler.state_dict() == before
        assert (before["_growth_tracker"], step.num_replayed) == (6, 2)


def test_a_gradient_that_no_optimizer_has_used_counts_into_the_next_window():
    """Such windows run without a graph."""

    def unused(model, sync, optimizer, x):
        sync.backward(model(x).sum(), count=len(x))
        del optimizer.param_groups[0]["params"][2:]
        sync.step(optimizer)

    with pytest.warns(UserWarning, match="they are added to the next window"):
        step, _ = _captured(unused)
    assert (step.num_captured, step.num_eager) == (0, 6)


def test_counts_read_ahead_are_refused():
    with recorded_device():
        sync = pe.GradSync(_model())
        step = sync.capture(lambda batches: None)
        window = next(sync.windows([torch.ones(2, 6)], count=len))
        with pytest.raises(ValueError, match="pass each count to sync.backward"):
            step(window)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "the parameters are on cpu: a graph needs a CUDA device"),
        ({"nonfinite": "raise"}, "nonfinite='raise'"),
        ({"accumulator": pe.Exact(micro_batches=4, slots=2), "accumulate": 4}, "leave slots out"),
    ],
)
def test_engines_whose_windows_cannot_be_captured_say_so(options, says):
    with pe.GradSync(_model(), **options) as sync, pytest.raises(ValueError, match=f"capture: .*{says}"):
        sync.capture(lambda batches: None)


# ---- over DDP ----


def _over_ddp(train: Any, *, windows: int = 6, norms: bool = False) -> tuple[Any, DistributedDataParallel]:
    """Capture windows of two micro-batches with DDP, trained by `train`; the engine is not closed."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(_model(norms=norms), gradient_as_bucket_view=True)
    sync, optimizer = pe.attach(model, accumulate=2), torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = sync.capture(lambda batches: train(model, sync, optimizer, batches))
    made = torch.Generator().manual_seed(rank)
    batches = [torch.randn(2, 6, generator=made) for _ in range(2 * windows)]
    torch.manual_seed(1)
    for window in sync.windows(batches):
        step(window)
    return step, model


def _train(model, sync, optimizer, batches):
    for x in batches:
        sync.backward(model(x).square().sum(), count=len(x))
    sync.step(optimizer)


@pytest.mark.parametrize("windows", [5, 7])  # the captured window is the last, or others follow
@on_ranks(2)
def test_a_capture_that_fails_in_ddps_last_backward_runs_the_window_without(windows):
    """The other rank launches its graph, so the failing rank must launch the same collectives."""
    is_one = torch.distributed.get_rank() == 1

    def fail(grad):
        if capture.is_capturing():
            raise OSError("no graph today")

    def fails(model, sync, optimizer, batches):
        for x in batches:
            out = model(x)
            if is_one:
                out.register_hook(fail)
            sync.backward(out.square().sum(), count=len(x))
        sync.step(optimizer)

    with recorded_device():
        with pytest.warns(UserWarning, match="no graph today") if is_one else nullcontext():
            step, model = _over_ddp(fails, windows=windows, norms=True)
        other, twin = _over_ddp(_train, windows=windows, norms=True)
    assert (step.num_captured, other.num_captured) == (int(not is_one), 1)
    states = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in states)


@on_ranks(1)
def test_ddp_of_another_stream_is_named():
    streams = iter(range(1000))
    with (
        recorded_device(),
        mock.patch.object(ddp_reducer, "current_stream", lambda device: next(streams)),
        pytest.warns(UserWarning, match="DDP was made on a different stream than windows run on: make DDP"),
    ):
        step, _ = _over_ddp(_train)
    assert (step.num_captured, step.num_eager) == (0, 6)


@on_ranks(2)
def test_ddps_parameters_that_no_window_uses_are_named():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with recorded_device(), mock.patch(f"{__name__}._model", lambda norms: Unused()):
        step, model = _over_ddp(_train)
    assert step.num_replayed == 1
    assert step.unused == ["unused.weight", "unused.bias"]
    assert [param.grad is None for param in model.parameters()] == [False, False, True, True]


@on_ranks(1)
def test_a_forward_behind_captured_windows_broadcasts_no_buffers():
    """Other ranks may not run a forward, so a broadcast could hang."""
    with recorded_device():
        step, model = _over_ddp(_train, norms=True)
        with mock.patch.object(torch.distributed, "_broadcast_coalesced") as broadcast:
            model(torch.ones(2, 6))
    assert (step.num_eager, step.num_captured, step.num_replayed) == (3, 1, 2)
    broadcast.assert_not_called()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "the host waits for collectives over gloo"),
        ({"gradient_as_bucket_view": True}, "the default stream of a device cannot be captured: make DDP"),
    ],
)
@on_ranks(1)
def test_a_ddp_that_cannot_be_captured_says_so(options, says):
    sync = pe.attach(DistributedDataParallel(_model(), **options))
    with (
        mock.patch.object(ddp_reducer, "is_on_default_stream", lambda device: True),
        pytest.raises(ValueError, match=f"capture: .*{says}"),
    ):
        sync.capture(lambda batches: None)


def test_arguments_are_checked():
    with pe.GradSync(_model()) as sync:
        with pytest.raises(TypeError, match="train_window is a int"):
            sync.capture(3)
        with pytest.raises(TypeError, match="at least 3"):
            sync.capture(print, warm_up=2)


def test_a_function_stays_compiled_while_it_is_watched_and_after():
    runs = []

    def backend(graph, example):
        def run(*args):
            runs.append(1)
            return graph(*args)

        return run

    function = torch.compile(lambda x: x.sin().sum(), backend=backend)
    for watching in (nullcontext(), capture.Rehearsal(lambda tensor: False), nullcontext()):
        with watching:
            function(torch.ones(3))
    assert len(runs) == 3
