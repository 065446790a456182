"""The cost model of windows on a network, by numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pyengine.cli.plan import model
from pyengine.cli.plan.model import HEADERS, Cluster, Speeds, Transport, Work
from pyengine.cli.wires import PLANNED, WIRES
from pyengine.gradients import layout
from pyengine.gradients.buckets import FIRST_BUCKET_BYTES

NUMEL = 1024 * 1000
KINDS = ("all_reduce fp32", "all_reduce bf16", "all_reduce fp16", "exchange")
KERNELS = [f"{op} {form}" for op in ("encode", "encode_residual", "sum", "decode")
           for form in ("int8", "e4m3", "e5m2", "bf16", "fp16")]  # fmt: skip
# A GB/s each, so that a byte is a nanosecond.
EVEN = Speeds(0.0, dict.fromkeys(KINDS, Transport(math.inf, 0.0)), dict.fromkeys(KERNELS, 1e9))
ROOMY = Cluster(4, 1, 1e9, cores_per_rank=2)
WORK = Work(NUMEL, forward_s=1.0, backward_s=2.0, step_s=0.5, bucket_bytes=NUMEL)  # four buckets


def test_a_float32_ring_of_four_sends_six_bytes_an_element_and_runs_no_kernel() -> None:
    found = model.sync(WIRES["fp32"], WORK, ROOMY, EVEN)
    assert found.bytes_sent == 6 * NUMEL
    assert found.link_s == pytest.approx(HEADERS * 6 * NUMEL / 1e9)
    assert (found.kernels_s, found.processor_s, found.limit) == (0, 0, "link")
    assert found.total_s == found.link_s


def test_exchanges_send_what_the_wire_says() -> None:
    found = model.sync(WIRES["bf16-sum-fp32"], WORK, ROOMY, EVEN)
    assert found.link_s == pytest.approx(HEADERS * 3 * NUMEL / 1e9)


@pytest.mark.parametrize(
    ("wire", "expected"),
    [  # per element, of four ranks: values of 4 bytes, codes of 1 and 4/256 of a scale or of 2
        ("fp32", {}),
        ("bf16", {"encode bf16": 6, "decode bf16": 6}),
        ("fp16-sum-fp32", {"encode fp16": 6, "sum fp16": 2 + 0.5, "decode fp16": 6}),
        ("int8", {"encode int8": 5.015625, "sum int8": 1.015625 * 1.25, "decode int8": 5.015625}),
        (
            "fp8-e4m3-ef",
            {"encode_residual e4m3": 13.015625, "sum e4m3": 1.015625 * 1.25 + 2, "decode e4m3": 5.015625},
        ),
    ],
)
def test_kernels_touch_what_their_docstrings_say(wire: str, expected: dict[str, float]) -> None:
    found = model.kernel_bytes(WIRES[wire], NUMEL, world_size=4)
    assert found == pytest.approx({name: each * NUMEL for name, each in expected.items()})


def test_kernels_take_their_bytes_by_their_rates() -> None:
    rates = dict.fromkeys(KERNELS, 1e12) | {"encode int8": 5.015625e9}
    found = model.sync(WIRES["int8"], WORK, ROOMY, Speeds(0.0, EVEN.transports, rates))
    assert found.kernels_s == pytest.approx(NUMEL / 1e9, rel=0.01)
    assert found.processor_s == found.kernels_s


def test_latency_counts_the_steps_of_every_bucket_and_of_the_header() -> None:
    speeds = Speeds(1e-3, EVEN.transports, EVEN.kernels)
    rings = model.sync(WIRES["fp32"], WORK, ROOMY, speeds)
    exchanges = model.sync(WIRES["int8"], WORK, ROOMY, speeds)
    assert rings.latency_s == pytest.approx(1e-3 * (4 * 6 + 6))
    assert exchanges.latency_s == pytest.approx(1e-3 * (4 * 4 + 6))


def test_the_slower_of_link_and_transport_counts() -> None:
    slow = dict.fromkeys(KINDS, Transport(0.5e9, 0.0))
    found = model.sync(WIRES["fp32"], WORK, ROOMY, Speeds(0.0, slow, EVEN.kernels))
    assert found.total_s == found.transport_s == pytest.approx(6 * NUMEL / 0.5e9)
    assert found.limit == "transport"


def test_a_ring_leaves_a_host_once_and_an_exchange_from_every_rank() -> None:
    pairs = Cluster(2, 2, 1e9, cores_per_rank=2)  # of four ranks
    assert model.link_bytes(WIRES["fp32"], NUMEL, pairs) == 6 * NUMEL
    # Codes: each rank sends two quarters to the other host, two ranks do; then three quarters go round.
    code = 2 * NUMEL
    expected = code / 4 * 2 * 2 + code / 4 * 3
    assert model.link_bytes(WIRES["bf16-sum-fp32"], NUMEL, pairs) == pytest.approx(expected)
    assert model.link_bytes(WIRES["fp32"], NUMEL, Cluster(1, 4, 1e9, 2)) == 0


def test_one_rank_sends_nothing() -> None:
    found = model.sync(WIRES["int8"], WORK, Cluster(1, 1, 1e9, 2), EVEN)
    assert (found.bytes_sent, found.exposed_s, found.limit) == (0, 0, "none")


@pytest.mark.parametrize(
    ("duration_s", "processor_s", "expected"),
    [
        (2.0, 0.0, 6.5),  # all of it but three quarters of the backward
        (0.25, 0.0, 0.25),  # the last bucket
        (0.25, 0.75, 0.75),  # what the backward's core has to do
    ],
)
def test_the_backward_hides_all_but_the_last_bucket_and_its_own_core(
    duration_s: float, processor_s: float, expected: float
) -> None:
    assert model.exposed([duration_s] * 2, processor_s, WORK) == pytest.approx(expected)


def test_a_single_bucket_is_hidden_by_nothing() -> None:
    assert model.exposed([1.0], 0.0, replace(WORK, bucket_bytes=4 * NUMEL, numel=1000)) == 1.0


def test_a_bucket_waits_for_its_gradients_and_for_the_one_before() -> None:
    work = Work(8, forward_s=0.0, backward_s=8.0, step_s=0.0, bucket_bytes=4 * 3)  # three, three and two
    assert model.exposed([5.0, 5.0, 1.0], 0.0, work) == pytest.approx(6.0)  # 3 to 8, to 13, to 14
    assert model.exposed([1.0, 1.0, 1.0], 0.0, work) == pytest.approx(1.0)  # 3 to 4, 6 to 7, 8 to 9
    assert model.exposed([9.0, 0.5, 1.0], 0.0, work) == pytest.approx(5.5)  # 3 to 12, to 12.5, to 13.5


@pytest.mark.parametrize("numel", [10, 99, 1000])
@pytest.mark.parametrize("duration_s", [0.01, 0.2, 1.0, 7.0])
def test_alike_buckets_at_once_are_what_they_are_one_by_one(numel: int, duration_s: float) -> None:
    work = Work(numel, forward_s=0.0, backward_s=10.0, step_s=0.0, bucket_bytes=4 * 7)
    filled, sent_s = 0, 0.0
    durations_s = [duration_s * size / 7 for size, _ in work.buckets]
    for (size, count), each_s in zip(work.buckets, durations_s, strict=True):
        for _ in range(count):
            filled += size
            sent_s = max(sent_s, 10.0 * filled / numel) + each_s
    assert model.exposed(durations_s, 0.0, work) == pytest.approx(sent_s - 10.0)


def test_any_number_of_buckets_costs_the_same_to_predict() -> None:
    work = Work(4 * 10**11, forward_s=0.0, backward_s=1.0, step_s=0.0, bucket_bytes=4)
    assert work.num_buckets == 4 * 10**11
    assert model.sync(WIRES["fp32"], work, ROOMY, EVEN).bytes_sent == 6 * work.numel


@pytest.mark.parametrize("mib", [0.5, 1, 25])
def test_buckets_are_as_the_engine_lays_them_out(mib: float) -> None:
    numels = [64 * 1024] * 320  # 80 MiB, in parameters that fill buckets whole
    work = Work(sum(numels), 0.0, 1.0, 0.0, bucket_bytes=mib * 2**20)
    params = [layout.ParamSpec(str(index), (numel,), torch.float32) for index, numel in enumerate(numels)]
    laid_out = layout.build(
        params,
        layout.backward_order(params),
        cap_bytes=int(work.bucket_bytes),
        world_size=2,
        first_bytes=FIRST_BUCKET_BYTES,
    )
    sizes = [size for size, count in work.buckets for _ in range(count)]
    assert sizes == [sum(slot.numel for slot in bucket.slots) for bucket in laid_out.buckets]


def test_ranks_that_share_a_core_take_longer_and_hide_no_sending() -> None:
    transports = dict.fromkeys(KINDS, Transport(1e9, 0.5e-9))
    speeds = Speeds(0.0, transports, EVEN.kernels)
    half, whole, two = (
        model.sync(WIRES["fp32"], WORK, Cluster(4, 1, math.inf, cores), speeds) for cores in (0.5, 1, 2)
    )
    assert half.transport_s == 2 * whole.transport_s == 2 * 6 * NUMEL / 1e9
    assert (half.processor_s, whole.processor_s, two.processor_s) == (
        whole.transport_s,
        whole.transport_s / 2,
        0,
    )


def test_a_window_is_its_micro_batches_the_exposed_sync_and_the_step() -> None:
    assert WORK.window_s(3, exposed_s=0.25) == 3 * (1.0 + 2.0) + 0.25 + 0.5


@pytest.mark.parametrize(
    ("exposed_s", "share"), [(0.1, 0.05), (0.2, 0.05), (0.33, 0.05), (7.0, 0.05), (1.0, 0.5), (0.0, 0.1)]
)
def test_the_fewest_micro_batches_keep_the_share_and_one_fewer_does_not(
    exposed_s: float, share: float
) -> None:
    fewest = WORK.least_accumulate(exposed_s, share)
    assert exposed_s <= share * WORK.window_s(fewest, exposed_s) * (1 + 1e-12)
    assert fewest == 1 or exposed_s > share * WORK.window_s(fewest - 1, exposed_s)


def test_a_share_that_is_met_exactly_is_met() -> None:
    work = Work(1, forward_s=0.7, backward_s=0.1, step_s=0.0, bucket_bytes=4)
    assert work.least_accumulate(0.8, 0.1) == 9  # 0.8 of 9 * 0.8 + 0.8; in floats a little more than 9


@pytest.mark.parametrize("name", PLANNED)
def test_every_wire_of_known_bytes_is_predicted(name: str) -> None:
    assert model.sync(PLANNED[name], WORK, ROOMY, EVEN).exposed_s > 0


def test_losses_are_named() -> None:
    assert [model.loss_of(WIRES[name]) for name in ("fp32", "bf16", "int8", "int8-ef")] == [
        "lossless", "lossy", "lossy", "lossy, fed back",
    ]  # fmt: skip


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(ValueError, match=r"nothing is known of 'encode int8', but of .*: measure it again"):
        model.sync(WIRES["int8"], WORK, ROOMY, Speeds(0.0, EVEN.transports, {"sum int8": 1e9}))
