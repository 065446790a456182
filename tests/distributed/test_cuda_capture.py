"""Windows as CUDA graphs on a GPU: 50 windows have the same bits as without a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.engine.captured_windows import MIN_WARM_UP
from pyengine.gradients.ddp.reducer import DDPReducer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOWS, ACCUMULATE = 50, 4


@pytest.fixture
def nccl():
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["", "nccl"], ids=["no group", "NCCL"])
def group(request):
    if request.param:
        request.getfixturevalue(request.param)


def _run(
    dtype: torch.dtype,
    *,
    captured: bool,
    compiled: bool = False,
    scales: bool = False,
    norms: bool = False,
    ddp: dict[str, Any] | None = None,
    **options: Any,
):
    """Train with a schedule, a window with nan, and a short last window.

    Use GradSync, or a DDP with the arguments `ddp`. Return the model's state, the records, and the function
    that trains windows.
    """
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64) if norms else nn.LayerNorm(64)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), norm, nn.Linear(64, 8)]
    model: nn.Module = nn.Sequential(*layers).cuda().to(dtype)
    if ddp is None:
        sync = pe.GradSync(model, accumulate=ACCUMULATE, **options)
    else:
        model = DistributedDataParallel(model, **ddp)
        sync = pe.attach(model, accumulate=ACCUMULATE, **options)
    forward: Any = torch.compile(model) if compiled else model
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    if scales:
        sync.scaler = pe.GradScaler("cuda", growth_interval=8)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)

    def train_window(batches: list[Any]) -> None:
        for x, y in batches:
            with torch.autocast("cuda", torch.float16, enabled=scales):
                loss = (forward(x.to(dtype)).float() - y).square().sum()
            sync.backward(loss, count=y.numel())
        sync.step(optimizer, scheduler, max_norm=1.0)

    step = sync.capture(train_window) if captured else lambda window: train_window(list(window))
    torch.manual_seed(1)
    x = torch.randn(WINDOWS * ACCUMULATE - 1, 16, 32, device="cuda")
    y = torch.randn(WINDOWS * ACCUMULATE - 1, 16, 8, device="cuda")
    x[20 * ACCUMULATE, 0, 0] = torch.nan
    torch.cuda.manual_seed(2)
    for window in sync.windows(list(zip(x, y, strict=True))):
        step(window)
    sync.close()
    if ddp is not None:  # afterwards, DDP works without the engine
        optimizer.zero_grad()
        model(x[0].to(dtype)).float().square().sum().backward()
        optimizer.step()
    seen = [(r.step, r.count, r.loss, r.grad_norm, r.skipped, r.collectives) for r in records]
    return [tensor.clone() for tensor in model.state_dict().values()], repr(seen), step


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "wire": "bf16"},
        {"dtype": torch.float32, "scales": True},
        {"dtype": torch.float32, "wire": pe.wire.ErrorFeedback(pe.wire.Int8())},
        {"dtype": torch.float32, "wire": pe.wire.FP8()},
        {"dtype": torch.float32, "accumulator": pe.Exact(micro_batches=ACCUMULATE)},
        {"dtype": torch.float32, "compiled": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*step was skipped")
@pytest.mark.usefixtures("group")
def test_captured_windows_have_the_bits_of_eager_ones(case):
    _assert_same_bits(MIN_WARM_UP, case)


def _assert_same_bits(min_warm_up, case):
    expected, records, _ = _run(**case, captured=False)
    found, others, step = _run(**case, captured=True)
    assert not step.problems
    assert step.num_captured == 1
    # Windows before the capture, the short one, and each window after a skipped one run without the graph.
    assert step.num_eager <= min_warm_up + 1 + records.count("True")
    assert others == records
    # The micro-batch with a nan makes BatchNorm's statistics nan in both runs.
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


VIEWS = {"gradient_as_bucket_view": True}


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": torch.float32, "ddp": {}},
        {"dtype": torch.float32, "ddp": VIEWS},
        {"dtype": torch.float32, "ddp": VIEWS, "norms": True},
        {"dtype": torch.float32, "ddp": {"static_graph": True}},
        {"dtype": torch.float32, "ddp": VIEWS | {"static_graph": True}},
        {"dtype": torch.bfloat16, "ddp": {}},
        {"dtype": torch.bfloat16, "ddp": VIEWS, "wire": "bf16"},
        {"dtype": torch.bfloat16, "ddp": VIEWS, "accumulator": "native"},
        {"dtype": torch.float32, "ddp": VIEWS, "scales": True},
        {"dtype": torch.float32, "ddp": VIEWS, "wire": pe.wire.ErrorFeedback(pe.wire.Int8())},
        {"dtype": torch.float32, "ddp": {}, "wire": pe.wire.FP8()},
        {"dtype": torch.float32, "ddp": VIEWS, "accumulator": pe.Exact(micro_batches=ACCUMULATE)},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*step was skipped")
@pytest.mark.usefixtures("nccl")
def test_captured_windows_over_ddp_have_the_bits_of_eager_ones(case):
    with torch.cuda.stream(torch.cuda.Stream()):
        _assert_same_bits(DDPReducer.min_warm_up, case)


@pytest.mark.usefixtures("nccl")
def test_a_ddp_on_the_default_stream_is_refused():
    sync = pe.attach(DistributedDataParallel(nn.Linear(4, 4).cuda()))
    with pytest.raises(ValueError, match=r"capture: the default stream of a device cannot be captured"):
        sync.capture(lambda batches: None)
    sync.close()


@pytest.mark.usefixtures("nccl")
def test_a_ddp_of_another_stream_is_named():
    model = DistributedDataParallel(nn.Linear(4, 4).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    with torch.cuda.stream(torch.cuda.Stream()), pe.attach(model) as sync:

        def train_window(batches: list[torch.Tensor]) -> None:
            sync.backward(model(batches[0]).sum())
            sync.step(optimizer)

        step = sync.capture(train_window)
        with pytest.warns(UserWarning, match="DDP was made on a different stream than windows run on"):
            [*map(step, sync.windows([torch.ones(2, 4, device="cuda")] * 14))]
    assert step.num_eager == 14
