"""Windows on a device that runs ahead of the host: what `bench step --device cuda` does, without one.

`Rehearsal` is a processor that says it is such a device; the CUDA device itself stands on a fake torch.cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from pyengine.cli.bench import arguments as bench_arguments
from pyengine.cli.bench import run as bench
from pyengine.cli.bench.kernels import cuda as kernels
from pyengine.cli.bench.report import Tables
from pyengine.cli.bench.windows import device as devices
from pyengine.cli.bench.windows import measure as windows
from pyengine.cli.bench.windows import models
from pyengine.cli.bench.windows.device import Cuda, Processor, count_calls, launches
from pyengine.cli.bench.windows.graph import replays
from pyengine.cli.bench.windows.variants import VARIANTS, Floor, NoSync
from pyengine.cli.main import build_parser, main

Ranks = Callable[[int], Any]
TINY = models.Shape(width=8, layers=1, heads=2, vocabulary=16, context=4)
OURS = ("engine", "no_sync_view", "engine_bf16", "attach", "no_sync_bf16", "floor", "by_hand")


class Rehearsal(Processor):
    """Runs ahead in name, holds a byte more with every question, and captures by doing it again."""

    runs_ahead = True
    replay_works = True

    def __init__(self) -> None:
        self.bytes = 0

    def allocated(self) -> int:
        self.bytes += 2**20
        return self.bytes

    def peak(self) -> int:
        return self.bytes + 2**21

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        run()
        return run if self.replay_works else lambda: None


class Uncounted(Rehearsal):
    """Its profiler does not start."""

    @property
    def activities(self) -> Any:  # type: ignore[override]
        raise OSError("no CUPTI")


class Broken(NoSync):
    """Cannot be made."""

    def setup(self) -> None:
        raise ValueError("no such hook")


class BreaksLater(Floor):
    """Fails in its fourth window."""

    windows = 0

    def step(self) -> None:
        self.windows += 1
        if self.windows == 4:
            raise ArithmeticError("out of numbers")
        super().step()


class Eight(NoSync):
    """Finds a gradient eight times as large."""

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        for _ in range(8):
            super().micro_batch(x, last=last)


@contextmanager
def rehearsed(**variants: type[Any]) -> Iterator[None]:
    with (
        mock.patch.dict(models._SHAPES, gpt=TINY),
        mock.patch.dict(devices.DEVICES, cpu=Rehearsal),
        mock.patch.dict(VARIANTS, variants),
        mock.patch.object(windows, "count_calls", counted),  # the profiler takes seconds to start
    ):
        yield


def counted(run: Callable[[], object], activities: object) -> dict[str, int]:
    run()
    return {"cudaLaunchKernel": 3}


def setting(*variants: str, dtype: str = "fp32", micro_batches: int = 2) -> windows.Setting:
    return windows.Setting("gpt", dtype, variants, rounds=1, micro_batches=micro_batches)


def measured(
    names: tuple[str, ...], dtype: str, micro_batches: int, **variants: type[Any]
) -> windows.Outcome:
    with rehearsed(**variants):
        return windows.measure(setting(*names, dtype=dtype, micro_batches=micro_batches), lambda done: None)


@pytest.mark.parametrize(("dtype", "micro_batches"), [("bf16", 1), ("fp16", 2)])
def test_every_variant_has_device_time_host_time_memory_and_calls(
    ranks: Ranks, dtype: str, micro_batches: int
) -> None:
    (outcome,) = ranks(1).run(measured, OURS, dtype, micro_batches)
    assert outcome.failed == {}
    rows = windows.rows(outcome)
    assert list(rows) == list(OURS)
    for row in rows.values():
        assert {"window_p50_ms", "host_p50_ms", "peak_mb", "launches", "copies", "waits"} <= set(row)
        assert row["peak_mb"] > 2 and row["launches"] == 3


def trained_by_hand(dtype: str) -> list[Tensor]:
    """Return parameters after a window by hand, and after one of DDP's."""
    found = []
    with rehearsed():
        for name in ("by_hand", "no_sync"):
            variant = setting(name, dtype=dtype).make(name, Rehearsal())
            variant.optimizer.param_groups[0]["lr"] = 0.125
            variant.window()
            found.append(torch.cat([p.detach().flatten().float() for p in variant.model.parameters()]))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_window_by_hand_trains_as_ddp_does(ranks: Ranks, dtype: str) -> None:
    for by_hand, of_ddp in ranks(2).run(trained_by_hand, dtype):
        # Adam's first step is the rate times g / (|g| + 1e-8), which rounding of g changes where g is tiny.
        is_close = (by_hand - of_ddp).abs() <= 1e-3 * 0.125
        assert is_close.float().mean() > 0.95


def uncounted() -> windows.Outcome:
    with rehearsed(), mock.patch.dict(devices.DEVICES, cpu=Uncounted):
        return windows.measure(setting("floor"), lambda done: None)


def test_a_profiler_that_fails_takes_no_times_along(ranks: Ranks) -> None:
    row = windows.rows(ranks(1).run(uncounted)[0])["floor"]
    assert row["not_counted"] == "OSError: no CUPTI" and row["peak_mb"] > 0 and row["window_p50_ms"] > 0


def test_the_hosts_time_is_the_first_windows_and_the_devices_the_second_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window costs the host a second, and ten where the one before still runs; the device takes seven."""
    clock = {"host": 0.0, "device": 0.0}

    class Slow(Rehearsal):
        def now(self) -> float:
            return clock["device"]

        def synchronize(self) -> None:
            clock["host"] = clock["device"] = max(clock.values())

    class Queues:
        def marks(self, now: Callable[[], Any]) -> list[Any]:
            is_idle = clock["device"] <= clock["host"]
            begin = now()
            clock["host"] += 1 if is_idle else 10
            clock["device"] = max(clock["device"], clock["host"]) + 7
            return [begin, *[now()] * 4]

    monkeypatch.setattr(windows.time, "perf_counter", lambda: clock["host"])
    taken = windows.Contestant(Queues, Slow()).turn()  # type: ignore[arg-type]
    assert (taken["host"], taken["window"]) == (1.0, 3.0 + 7.0)


def test_a_variants_peak_leaves_out_what_others_hold() -> None:
    held = {"bytes": 100}

    class Counted(Rehearsal):
        def allocated(self) -> int:
            return held["bytes"]

        def peak(self) -> int:
            return held["bytes"] + 7 * 2**20

    class Holds:
        is_new = True

        def marks(self, now: Callable[[], Any]) -> list[Any]:
            held["bytes"] += 2**20 * self.is_new  # an optimizer's state
            self.is_new = False
            return [0.0] * 5

    def make() -> Any:
        held["bytes"] += 2**21
        return Holds()

    device = Counted()
    windows.Contestant(make, device)
    second = windows.Contestant(make, device)
    second.turn()
    assert second.memory()["peak_mb"] == 2 + 1 + 7


@pytest.mark.parametrize("world", [1, 2])
def test_a_variant_that_fails_is_a_row_and_the_others_are_measured(ranks: Ranks, world: int) -> None:
    names = ("engine", "broken", "later", "floor")
    outcomes = ranks(world).run(measured, names, "fp32", 2, broken=Broken, later=BreaksLater)
    rows = windows.rows(windows.merged(outcomes))
    assert rows["broken"] == {"failed": "ValueError: no such hook"}
    assert rows["later"] == {"failed": "ArithmeticError: out of numbers"}
    assert all("window_p50_ms" in rows[name] for name in ("engine", "floor"))


def fails_alone() -> str:
    """Return what a rank raises that fails while the other one does not come."""
    if dist.get_rank() == 0:
        dist.new_group(backend="gloo")
        return ""
    short = mock.patch.object(windows, "_PATIENCE", timedelta(seconds=0.2))
    with short, pytest.raises(ValueError, match="hook") as caught:
        measured(("broken",), "fp32", 2, broken=Broken)
    return str(caught.value)


def test_who_fails_alone_ends_with_the_reason_soon(ranks: Ranks) -> None:
    assert ranks(2).run(fails_alone)[1] == "no such hook"


def test_the_variant_whose_gradient_is_the_odd_one_is_left_out(ranks: Ranks) -> None:
    (outcome,) = ranks(1).run(measured, ("engine", "eight", "no_sync"), "fp32", 2, eight=Eight)
    assert list(outcome.failed) == ["eight"]
    assert outcome.failed["eight"].startswith("variants find different gradients for the same window")
    assert list(windows.rows(outcome)) == ["engine", "no_sync", "eight"]


def test_a_run_without_a_variant_left_says_why_of_each(ranks: Ranks) -> None:
    (said,) = ranks(1).run(all_broken)
    assert said == "no variant could be measured: {'broken': 'ValueError: no such hook'}"


def all_broken() -> str:
    with pytest.raises(RuntimeError) as caught:
        measured(("broken",), "fp32", 2, broken=Broken)
    return str(caught.value)


# ---- one window as a graph ----


class Idle(Rehearsal):
    """Its graphs do nothing."""

    replay_works = False


def captured(kind: type[Processor], variant: str) -> dict[str, float] | str:
    with rehearsed(), mock.patch.dict(devices.DEVICES, cpu=kind):
        try:
            return replays(setting(variant), variant)
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("variant", ["by_hand", "no_sync_view"])
def test_a_captured_window_is_timed_on_the_device_and_on_the_host(ranks: Ranks, variant: str) -> None:
    (found,) = ranks(1).run(captured, Rehearsal, variant)
    assert found["graph_p50_ms"] > 0 and found["graph_host_p50_ms"] > 0


def test_a_graph_whose_replays_do_not_train_is_none(ranks: Ranks) -> None:
    (said,) = ranks(1).run(captured, Idle, "by_hand")
    assert "a replay does not train" in said and "parameters as they were" in said


def test_a_processor_has_no_graphs(ranks: Ranks) -> None:
    assert ranks(1).run(captured, Processor, "by_hand") == ["a CUDA graph needs a CUDA device"]


@pytest.mark.parametrize(("raised", "says"), [(RuntimeError("a\nb"), "b"), (TimeoutError("late"), "late")])
def test_why_there_is_no_graph_stands_in_the_row(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, says: str
) -> None:
    steps = bench_arguments.Steps(1, setting("engine", "floor"), (), graph=True)
    monkeypatch.setattr(bench, "launch", mock.Mock(side_effect=raised))
    rows: dict[str, dict[str, Any]] = {"engine": {}, "floor": {}, "attach": {"failed": "it broke"}}
    assert list(bench.add_graphs(steps, rows)) == ["engine", "floor"]
    assert rows["floor"] == {"no_graph": says}
    assert rows["engine"]["no_graph"].startswith("the host writes every window's header")
    assert rows["attach"] == {"failed": "it broke"}


# ---- the device ----


def test_calls_are_told_by_kind_and_the_profilers_own_wait_is_none() -> None:
    calls = {
        "cudaLaunchKernel": 3,
        "cuLaunchKernelEx": 2,
        "cudaMemcpyAsync": 4,
        "cudaMemsetAsync": 1,
        "cudaEventSynchronize": 6,
        "cudaDeviceSynchronize": 9,
        "aten::cumsum": 9,
        "Memcpy HtoD": 9,
    }
    assert launches(calls) == {"launches": 5, "copies": 5, "waits": 6}


@pytest.mark.slow  # seconds, until the profiler is up
def test_the_profiler_counts_calls_by_name() -> None:
    x = torch.zeros(2)
    assert count_calls(lambda: (x.add(1), x.add(1)), (ProfilerActivity.CPU,))["aten::add"] == 2


class FakeEvent:
    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.clock += 250.0
        self.at = FakeEvent.clock

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_the_cuda_device_is_timed_by_events_and_counted_by_torchs_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = mock.Mock(spec=torch.cuda)
    fake.Event, fake.memory_allocated.return_value, fake.max_memory_allocated.return_value = FakeEvent, 5, 7
    monkeypatch.setattr(devices.torch, "cuda", fake)
    device = Cuda()
    begin, end = device.now(), device.now()
    device.synchronize()
    device.reset_peak()
    assert device.seconds(begin, end) == 0.25
    assert (device.allocated(), device.peak()) == (5, 7)
    assert fake.synchronize.called and fake.reset_peak_memory_stats.called


def test_a_devices_card_names_driver_nccl_and_the_variant_of_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = mock.MagicMock(spec=torch.cuda)
    fake.get_device_properties.return_value = mock.Mock(
        major=9, minor=0, L2_cache_size=2**26, total_memory=2**37
    )
    fake.nccl.version.return_value = (2, 28, 9)
    monkeypatch.setattr(kernels.torch, "cuda", fake)
    monkeypatch.setattr(kernels.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        kernels.subprocess, "run", lambda *_, **__: mock.Mock(stdout="580.159.04\n580.159.04\n")
    )
    monkeypatch.setattr(kernels.native, "core", lambda: mock.Mock(has_cuda=True))
    card = devices.card("cuda")
    assert (card["driver"], card["nccl"]) == ("580.159.04", "2.28.9")
    assert (card["capability"], card["l2_mib"], card["memory_gib"]) == ("9.0", 64.0, 128.0)
    assert devices.card("cpu") == {}


def test_a_capture_runs_on_the_side_stream_and_lets_other_threads_ask_for_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, run = mock.MagicMock(spec=torch.cuda), mock.Mock()
    monkeypatch.setattr(devices.torch, "cuda", fake)
    device = Cuda()
    with device.for_capture():
        replay = device.capture(run)
    graph, stream = fake.CUDAGraph.return_value, fake.current_stream.return_value
    fake.stream.assert_called_once_with(fake.Stream.return_value)
    fake.graph.assert_called_once_with(graph, stream=stream, capture_error_mode="thread_local")
    run.assert_called_once_with()
    assert replay is graph.replay


def meets_over_nccl() -> tuple[str, list[int]]:
    """Enter the CUDA device with a group that is gloo's in fact; return what was asked for."""
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


def test_every_rank_takes_its_device_and_meets_the_others_over_nccl(ranks: Ranks) -> None:
    found = ranks(2).run(meets_over_nccl)
    assert found == [("cpu:gloo,cuda:nccl", [0, 2]), ("cpu:gloo,cuda:nccl", [1, 2])]


# ---- models ----


@pytest.mark.slow  # torch's meta device imports for seconds
def test_gpt124_has_the_size_of_gpt_2() -> None:
    with torch.device("meta"):
        model, batches = models.GPT(models.GPT2), models.GPT2
    assert sum(p.numel() for p in model.parameters()) == 124_082_688
    assert batches.sequences * batches.context == 2048


def test_fp16_keeps_parameters_in_fp32_and_computes_in_fp16() -> None:
    seen: list[torch.dtype] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    with mock.patch.object(models, "Small", lambda: Spy(64, 1)):
        model, (x, *_) = models.build("small", torch.float16, 0, micro_batches=1)
    loss = model(x)
    assert seen == [torch.float16] and loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ---- the command ----


def on_cuda(*arguments: str, devices: int = 2) -> bench_arguments.Steps:
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: devices),
        mock.patch("pyengine.cli.bench.arguments.find_spec", lambda name: name),
    ):
        options = build_parser().parse_args(["bench", "step", "--device", "cuda", *arguments])
        steps = bench_arguments.settings(options).steps
    assert steps is not None
    return steps


def test_on_cuda_there_is_a_rank_a_device_and_the_engine_comes_first() -> None:
    steps = on_cuda("--accumulate", "1", "--graph", "--model", "gpt124", "--dtype", "fp16")
    assert (steps.workers, steps.graph, steps.setting.name) == (2, True, "gpt124:fp16:1")
    assert steps.setting.device == "cuda"
    assert steps.setting.variants[0] == "engine" and {*OURS, "accelerate"} == {*steps.setting.variants}


def test_more_ranks_than_devices_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: 1),
        pytest.raises(SystemExit),
    ):
        main(["bench", "step", "--device", "cuda", "--workers", "2"])
    assert "argument --workers: got 2 with --device cuda, and NCCL needs a device each" in (
        capsys.readouterr().err
    )


def test_the_table_shows_what_the_device_tells_and_who_failed(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "window_p50_ms": 12.5,
        "window_min_ms": 12.0,
        "host_p50_ms": 3.25,
        "peak_mb": 900.0,
        "launches": 120,
        "copies": 7,
        "waits": 1,
        "graph_p50_ms": 9.5,
    }
    rows: dict[str, dict[str, Any]] = {"by_hand": row, "attach": {"failed": "it broke"}}
    rows["engine"] = row | {"no_graph": "too clever"}
    del rows["engine"]["graph_p50_ms"]
    times = {name: [{"window": 0.0125}] for name in ("by_hand", "engine")}
    with mock.patch.dict("os.environ", COLUMNS="160"):
        Tables().windows("gpt124:bf16", times, rows)
    head, _, by_hand, attach, engine, why = [
        line for line in capsys.readouterr().out.splitlines() if line.strip()
    ]
    assert head.split()[-7:] == ["host", "ms", "calls", "peak", "MB", "graph", "ms"]
    assert by_hand.split()[-8:] == ["3.2", "120", "+", "7", "+", "1", "900", "9.5"]
    assert attach.split() == ["attach", "failed"]
    assert engine.split()[-1] == "–"
    assert why == "no graph, GradSync: too clever"
