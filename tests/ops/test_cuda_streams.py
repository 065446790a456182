"""CUDA ops in graphs, on concurrent streams and with large memory; these tests need a GPU."""

import subprocess
import sys

import pytest
import torch
from cuda_cases import MANY, PLANS, EveryOp, assert_same, on_host

pytestmark = pytest.mark.gpu

LAYOUTS = {name: (PLANS | MANY)[name] for name in ("odd offsets", "5000 slots")}
on_plans = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@on_plans
def test_a_graph_of_every_op_replays(gpu, layout):
    ops, graph = EveryOp(gpu, layout), torch.cuda.CUDAGraph()
    ops.run()  # uploads the plan to the device
    with torch.cuda.graph(graph):
        ops.run()
    for _ in range(3):
        ops.restore()
        graph.replay()
        assert_same(ops.results, on_host(layout))


# This runs in its own process, where no other test has launched these kernels: CUDA loads a kernel at its
# first launch.
NEVER_LAUNCHED = """
import torch
from pyengine.ops import BucketPlan
plan, one, cuda = BucketPlan([0, 3], [3, 5]), torch.tensor(1.0, device="cuda"), {"device": "cuda"}
flags, sumsq = torch.zeros(2, dtype=torch.uint8, **cuda), torch.zeros(2, dtype=torch.float64, **cuda)
plan.pack_(torch.empty(8, **cuda), [torch.ones(3, **cuda), None], one)
grads = [torch.full((n,), 2.0, dtype=torch.float16, **cuda) for n in (3, 5)]
acc, wire = torch.zeros(8, **cuda), torch.zeros(8, dtype=torch.bfloat16, **cuda)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    plan.accumulate_(acc, grads, one, first=True, nonfinite=flags)
    plan.accumulate_(acc, grads, one, first=False, nonfinite=flags)
    plan.accumulate_cast_(wire, acc, grads, one, one, first=False, nonfinite=flags)
    plan.unpack_(grads, wire, one)
    plan.unscale_norm(grads, grads, one, sumsq=sumsq, nonfinite=flags)
graph.replay()
assert wire.tolist() == [6.0] * 8 and sumsq.tolist() == [108.0, 180.0], (wire, sumsq)
"""


def test_a_graph_captures_kernels_that_were_never_launched(gpu):
    done = subprocess.run([sys.executable, "-c", NEVER_LAUNCHED], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@on_plans
def test_calls_between_replays_leave_the_graph_right(gpu, layout):
    ops, graph = EveryOp(gpu, layout), torch.cuda.CUDAGraph()
    other = EveryOp(gpu, layout, torch.float32, plan=ops.plan)
    ops.run()
    with torch.cuda.graph(graph):
        ops.run()
    ops.restore()
    for _ in range(3):
        other.run()
        graph.replay()
    assert_same(ops.results, on_host(layout))
    assert_same(other.results, on_host(layout, torch.float32))


@on_plans
def test_one_plan_runs_on_two_streams_at_once(gpu, layout):
    first = EveryOp(gpu, layout)
    runs = [first, EveryOp(gpu, layout, torch.float32, plan=first.plan)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in runs]
    for _ in range(20):
        for ops, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                ops.run()
    torch.cuda.synchronize()
    assert_same(runs[0].results, on_host(layout))
    assert_same(runs[1].results, on_host(layout, torch.float32))


@on_plans
def test_pointers_made_on_one_stream_serve_another(gpu, layout):
    ops, stream = EveryOp(gpu, layout), torch.cuda.Stream()
    ops.grads, ops.back_list = ops.plan.pointers(ops.grads), ops.back
    ops.back = ops.plan.pointers(ops.back_list)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.run()
    torch.cuda.synchronize()
    ops.back = ops.back_list
    assert_same(ops.results, on_host(layout))


def test_a_slot_of_more_than_two_to_the_31_bytes_is_reached_to_its_end(gpu):
    numel = 2**30 + 19
    if torch.cuda.mem_get_info()[0] < 3 * 2 * numel:
        pytest.skip("needs 6 GiB of free GPU memory")
    x, flat = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in (numel, numel + 5))
    x[-1], x[2**30 - 1], x[0] = 3, 2, 1
    plan, one = gpu.plan([0, 5], [5, numel]), gpu.place(torch.tensor(1.0))
    sumsq, seen = gpu.place(torch.zeros(2).double()), gpu.place(torch.zeros(2, dtype=torch.uint8))
    plan.unscale_norm([None, x], None, one, sumsq=sumsq, nonfinite=seen)
    plan.pack_(flat, [None, x], one)
    assert sumsq.tolist() == [0, 14] and seen.tolist() == [0, 0]
    assert torch.equal(flat[5:], x)
