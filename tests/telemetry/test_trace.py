"""A Chrome trace shows backwards, each bucket's reduction and the exposed part of it.

Without a profiler, nothing is recorded.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.ops import trace
from pyengine.telemetry import chrome_trace

BUCKETS, WINDOWS = 3, 2


def _train(folder: str, kind: str) -> bool:
    torch.manual_seed(0)
    # Each layer has 64 KiB of gradients and its own bucket.
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(BUCKETS)])
    cap = {"bucket_cap_mb": 1 / 16}
    if kind == "own":
        forward, sync = model, pe.GradSync(model, accumulate=2, **cap)
    else:
        forward = DistributedDataParallel(model, **cap)
        sync = pe.attach(forward, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(windows: int) -> None:
        for window in sync.windows([torch.ones(8, 128)] * 2 * windows):
            for x in window:
                sync.backward(forward(x).mean())
            sync.step(optimizer)

    train(2)  # after these windows, the bucket layout is final
    path = Path(f"{folder}/{kind}.json")
    with chrome_trace(path, rank=1):
        train(WINDOWS)
    dist.barrier()
    return path.exists()


def _ranges(path: str) -> dict[str, list[tuple[float, float]]]:
    """Return the (start, end) pairs of all ranges by name, in order."""
    with open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    found: dict[str, list[tuple[float, float]]] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        name = event["name"].removeprefix("pyengine: ")
        found.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def _within(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, _pool):
    from ranks import Ranks

    folder = tmp_path_factory.mktemp("traces")
    for kind in ("own", "attach"):
        assert Ranks(_pool, 2).run(_train, str(folder), kind) == [True, True]
    return {kind: _ranges(str(folder / f"{kind}.json")) for kind in ("own", "attach")}


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_every_backward_and_step_is_a_range_and_a_bucket_is_launched_in_a_last_backward(profiled, kind):
    ranges = profiled[kind]
    assert (len(ranges["backward"]), len(ranges["optimizer"])) == (2 * WINDOWS, WINDOWS)
    for bucket in range(BUCKETS):
        for launch, backward in zip(ranges[f"launch bucket {bucket}"], ranges["backward"][1::2], strict=True):
            assert _within(launch, backward)


def test_every_bucket_is_copied_back_inside_the_exposed_part(profiled):
    for bucket in range(BUCKETS):
        landings = profiled["own"][f"wait for bucket {bucket}"]
        for landing, exposed in zip(landings, profiled["own"]["exposed_sync"], strict=True):
            assert _within(landing, exposed)


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_every_reduction_is_seen_on_its_way(profiled, kind):
    # Two ranks exchange small buffers with an all-gather.
    reductions = sorted([*profiled[kind]["gloo:all_reduce"], *profiled[kind]["gloo:all_gather"]])
    ends = 1  # one at the end of the loop: how the last window was used
    assert len(reductions) == WINDOWS * (1 + BUCKETS) + ends  # the header is the first
    launched = [profiled[kind][f"launch bucket {bucket}"][0] for bucket in range(BUCKETS)]
    for (start, _), (asked, _) in zip(reductions[1 : 1 + BUCKETS], launched, strict=True):
        assert start >= asked


def test_nothing_is_recorded_where_no_profiler_looks(monkeypatch):
    def refuse(name):
        raise AssertionError(name)

    monkeypatch.setattr(trace, "record_function", refuse)
    with trace.span("backward"):
        pass


def test_cuda_tools_get_nvtx_ranges(monkeypatch):
    ranges = []

    @contextmanager
    def remember(name):
        ranges.append(name)
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", remember)
    with trace.span("launch bucket", 3), trace.span("backward"):
        pass
    assert ranges == ["pyengine: launch bucket 3", "pyengine: backward"]
