"""Windows as CUDA graphs on a GPU: the bits of the same windows without, over 50 windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe
from pyengine.engine.captured_windows import MIN_WARM_UP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOWS, ACCUMULATE = 50, 4


@pytest.fixture(params=[False, True], ids=["no group", "NCCL"])
def group(request):
    if request.param:
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    if request.param:
        dist.destroy_process_group()


def _run(dtype: torch.dtype, *, captured: bool, compiled: bool = False, scales: bool = False, **options: Any):
    """Train with a schedule, a window with nan, and a short last window; return parameters and records."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 8)]
    model = nn.Sequential(*layers).cuda().to(dtype)
    forward: Any = torch.compile(model) if compiled else model
    sync = pe.GradSync(model, accumulate=ACCUMULATE, **options)
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
    seen = [(r.step, r.count, r.loss, r.grad_norm, r.skipped, r.collectives) for r in records]
    return [param.detach().clone() for param in model.parameters()], repr(seen), step


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
    expected, records, _ = _run(**case, captured=False)
    found, others, step = _run(**case, captured=True)
    assert not step.problems
    assert step.num_captured == 1
    # Before the capture, the short one, and each behind one that was skipped.
    assert step.num_eager <= MIN_WARM_UP + 1 + records.count("True")
    assert others == records
    assert all(map(torch.equal, found, expected))
