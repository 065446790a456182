"""Windows of `bench`: every variant, failures, and `--device cuda` over a mock of torch.cuda."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyengine.cli.bench import arguments as bench_arguments
from pyengine.cli.bench import device as devices
from pyengine.cli.bench import measure as windows
from pyengine.cli.bench import models
from pyengine.cli.bench.device import Cuda
from pyengine.cli.bench.report import BenchReport
from pyengine.cli.bench.variants import PHASES, VARIANTS, Floor, NoSync
from pyengine.cli.main import build_parser, main

TINY = models.Shape(width=8, layers=1, heads=2, vocabulary=16, context=4)
HOOKS = ("no_sync_bf16", "no_sync_fp16")
NAMES = ("engine", "no_sync_view", "engine_bf16", "engine_exact_slots", "attach", *HOOKS, "floor")


class Broken(NoSync):
    """Fails in `setup`."""

    def setup(self) -> None:
        raise ValueError("no such hook")


class BreaksLater(Floor):
    windows = 0

    def step(self) -> None:
        self.windows += 1
        if self.windows == 3:
            raise ArithmeticError("out of numbers")
        super().step()


def measured(
    names: tuple[str, ...], dtype: str, micro_batches: int, **variants: type[Any]
) -> windows.Measurements:
    setting = windows.Setting("gpt", dtype, names, rounds=1, micro_batches=micro_batches)
    with mock.patch.dict(models._SHAPES, gpt=TINY), mock.patch.dict(VARIANTS, variants):
        return windows.measure(setting, lambda done: None)


@pytest.mark.parametrize(("dtype", "micro_batches"), [("bf16", 1), ("fp16", 2)])
def test_every_variant_has_times_of_each_phase(ranks, dtype, micro_batches):
    (outcome,) = ranks(1).run(measured, NAMES, dtype, micro_batches)
    assert outcome.failed == {}
    rows = windows.rows(outcome)
    assert list(rows) == list(NAMES)
    assert all(row[f"{phase}_p50_ms"] >= 0 for row in rows.values() for phase in PHASES)


@pytest.mark.parametrize("world", [1, 2])
def test_a_variant_that_fails_is_a_row_and_the_others_are_measured(ranks, world):
    names = ("engine", "broken", "later", "floor")
    outcomes = ranks(world).run(measured, names, "fp32", 2, broken=Broken, later=BreaksLater)
    rows = windows.rows(windows.merged(outcomes))
    assert rows["broken"] == {"failed": "ValueError: no such hook"}
    assert rows["later"] == {"failed": "ArithmeticError: out of numbers"}
    assert all("window_p50_ms" in rows[name] for name in ("engine", "floor"))


def fails_alone() -> str:
    """Return the error of rank 1, which fails while rank 0 does not take part."""
    if dist.get_rank() == 0:
        dist.new_group(backend="gloo")
        return ""
    short = mock.patch.object(windows, "_TIMEOUT", timedelta(seconds=0.2))
    with short, pytest.raises(ValueError, match="hook") as caught:
        measured(("broken",), "fp32", 2, broken=Broken)
    return str(caught.value)


def test_who_fails_alone_ends_with_the_reason_soon(ranks):
    assert ranks(2).run(fails_alone)[1] == "no such hook"


def raised(*names: str, **variants: type[Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        measured(names, "fp32", 2, **variants)
    return str(caught.value)


def test_a_run_without_a_variant_left_reports_why_of_each(ranks):
    (error,) = ranks(1).run(raised, "broken", broken=Broken)
    assert error == "no variant could be measured: {'broken': 'ValueError: no such hook'}"


class Eight(NoSync):
    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        for _ in range(8):
            super().micro_batch(x, last=last)


class Alone(Floor):
    """Trains every rank alone, but claims to synchronize gradients."""

    is_synced = True


@pytest.mark.parametrize("odd_one", [Eight, Alone])
def test_two_variants_with_different_gradients_stop_the_run_on_every_rank(ranks, odd_one):
    errors = ranks(2).run(raised, "engine", "odd", odd=odd_one)
    assert all("different gradients" in text and "'odd'" in text for text in errors)


def test_the_variant_whose_gradient_is_the_odd_one_is_left_out(ranks):
    (outcome,) = ranks(1).run(measured, ("engine", "odd", "no_sync"), "fp32", 2, odd=Eight)
    assert outcome.failed["odd"].startswith("variants find different gradients for the same window")
    assert list(windows.rows(outcome)) == ["engine", "no_sync", "odd"]


# ---- the device ----


def test_windows_on_cuda_are_timed_by_events(monkeypatch):
    event = mock.Mock(elapsed_time=lambda end: 250.0)
    monkeypatch.setattr(devices.torch, "cuda", mock.Mock(Event=lambda enable_timing: event))
    device = Cuda()
    assert device.seconds(device.now(), device.now()) == 0.25


def meets_over_nccl() -> tuple[str, list[int]]:
    """Enter the CUDA device with gloo in place of NCCL; return the requested backend, device and a sum."""
    begin = dist.init_process_group
    asked: list[str] = []

    def over_gloo(backend: str, **options: Any) -> None:
        asked.append(backend)
        begin("gloo", **options)

    one = torch.ones(1)
    with (
        mock.patch.object(dist, "init_process_group", over_gloo),
        mock.patch.object(torch.cuda, "set_device") as set_device,
        mock.patch.dict("os.environ", LOCAL_RANK=str(dist.get_rank())),
        Cuda().entered(),
    ):
        dist.all_reduce(one)
    return asked[0], [set_device.call_args.args[0].index, int(one)]


def test_every_rank_takes_its_device_and_meets_the_others_over_nccl(ranks):
    found = ranks(2).run(meets_over_nccl)
    assert found == [("cpu:gloo,cuda:nccl", [0, 2]), ("cpu:gloo,cuda:nccl", [1, 2])]


# ---- models ----


def test_fp16_keeps_parameters_in_fp32_and_computes_in_fp16():
    seen: list[torch.dtype] = []

    class Spy(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    with mock.patch.object(models, "Small", lambda: Spy(64, 1)):
        model, (x, *_) = models.build("small", torch.float16, 0, micro_batches=1)
    loss = model(x)
    assert seen == [torch.float16] and loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ---- the command ----


def on_cuda(*arguments: str, devices: int = 2) -> bench_arguments.BenchSettings:
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: devices),
        mock.patch("pyengine.cli.bench.arguments.find_spec", lambda name: name),
    ):
        options = build_parser().parse_args(["bench", "--device", "cuda", *arguments])
        return bench_arguments.settings(options)


def test_on_cuda_there_is_a_rank_a_device():
    settings = on_cuda("--accumulate", "1", "--model", "gpt124", "--dtype", "fp16")
    (case,) = settings.cases
    assert (settings.workers, case.name, case.device) == (2, "gpt124:fp16:1", "cuda")


def test_more_ranks_than_devices_are_refused_by_name(capsys):
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: 1),
        pytest.raises(SystemExit),
    ):
        main(["bench", "--device", "cuda", "--workers", "2"])
    assert "argument --workers: got 2 with --device cuda, but NCCL needs one device per worker" in (
        capsys.readouterr().err
    )


def test_the_table_shows_times_and_who_failed(capsys):
    row = {"window_p50_ms": 12.5, "window_min_ms": 12.0, "sync_p50_ms": 2.5}
    rows: dict[str, dict[str, Any]] = {"engine": row, "attach": {"failed": "it broke"}}
    times = {"engine": [{"window": 0.0125}]}
    with mock.patch.dict("os.environ", COLUMNS="160"):
        BenchReport().windows("gpt124:bf16", times, rows)
    _, _, engine, attach = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert engine.split() == ["GradSync", "12.5", "12.0", "0%", "2.5", "20%"]
    assert attach.split() == ["attach", "failed"]
