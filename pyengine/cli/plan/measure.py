"""A calibration of this machine: two workers at the same time, over the loopback interface."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyengine.cli.bench.machine import card
from pyengine.cli.bench.windows.models import MICRO_BATCHES, build
from pyengine.cli.plan.calibration import TRANSPORTS, WORKERS, Calibration
from pyengine.cli.plan.model import Speeds, Transport, Work
from pyengine.comm import TorchDist
from pyengine.comm.launching import launch
from pyengine.ops.codec import Codec
from pyengine.ops.codec_reference import FORMATS

BUCKET_BYTES = 25 * 2**20  # the engine's own, of float32
_PAYLOADS = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROUNDS, _SMALL = 5, 100
_MAX_NORM = 1.0


def measure(model: str = "gpt") -> Calibration:
    """Measure kernels, transport and latency here, and a micro-batch of a model of the benchmark's.

    Raises:
        RuntimeError: a worker failed.
    """
    ranks = launch(_on_rank, workers=WORKERS, args=(model,))
    slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    bytes_sent = BUCKET_BYTES  # what every measurement of a transport counts as sent
    transports = {
        name: Transport(bytes_sent / slowest[name], slowest[f"cpu of {name}"] / bytes_sent)
        for name in TRANSPORTS
    }
    kernels = {
        name.removeprefix("kernel "): rate
        for name in ranks[0]
        if name.startswith("kernel ")
        for rate in [min(rank[name] for rank in ranks)]
    }
    work = Work(
        numel=int(slowest["numel"]),
        forward_s=slowest["forward"],
        backward_s=slowest["backward"],
        step_s=slowest["step"],
        bucket_bytes=BUCKET_BYTES,
    )
    speeds = Speeds(slowest["latency"], transports, kernels)
    return Calibration(card(1) | {"workers": WORKERS}, os.cpu_count() or 1, speeds, work)


def _on_rank(model: str) -> dict[str, float]:
    """Measure on one of the workers, all of which do the same at the same time."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for form in FORMATS:
        found |= {f"kernel {op} {form}": rate for op, rate in _kernels(form).items()}
    for kind, run in _collectives().items():
        found[kind], found[f"cpu of {kind}"] = _timed(run)
    one, world_size = torch.zeros(1), dist.get_world_size()
    seconds, _ = _timed(lambda: [dist.all_reduce(one) for _ in range(_SMALL)])
    found["latency"] = seconds / _SMALL / (2 * (world_size - 1))
    return found | _model(model)


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the median time of a call, and of the processor for it, on ranks that begin together."""
    wall, cpu = [], []
    for _ in range(1 + _ROUNDS):
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    return statistics.median(wall[1:]), statistics.median(cpu[1:])


def _kernels(form: str) -> dict[str, float]:
    """Return bytes read and written a second by every op of a format."""
    codec = Codec(form, 1 if form in ("bf16", "fp16") else 256)
    values = torch.randn(BUCKET_BYTES // 4)
    numel, payload = values.numel(), torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    residual, decoded = torch.zeros_like(values), torch.empty_like(values)
    codec.encode_(payload, values)
    payloads = payload.repeat(_PAYLOADS, 1)
    plain = 4 * numel + payload.numel()
    runs: dict[str, tuple[Callable[[], None], int]] = {
        "encode": (lambda: codec.encode_(payload, values), plain),
        "encode_residual": (lambda: codec.encode_(payload, values, residual=residual), plain + 8 * numel),
        "sum": (lambda: codec.sum_encode_(payload, payloads), payloads.numel() + payload.numel()),
        "decode": (lambda: codec.decode_(decoded, payload), plain),
    }
    return {op: num_bytes / _timed(run)[0] for op, (run, num_bytes) in runs.items()}


def _collectives() -> dict[str, Callable[[], Any]]:
    """Return, by kind, what sends `BUCKET_BYTES` from each of two ranks."""
    comm = TorchDist(None, torch.device("cpu"))
    found: dict[str, Callable[[], Any]] = {}
    for name, dtype in _DTYPES.items():  # a ring of two sends each rank's buffer once
        flat = torch.zeros(BUCKET_BYTES // dtype.itemsize, dtype=dtype)
        found[f"all_reduce {name}"] = partial(_all_reduce, comm, flat)
    rows = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
    received, own = torch.empty_like(rows), rows[: BUCKET_BYTES // comm.world_size].clone()

    def exchange() -> None:
        comm.all_to_all(received, rows).wait()
        comm.all_gather(rows, own).wait()

    return found | {"exchange": exchange}


def _all_reduce(comm: TorchDist, flat: Tensor) -> None:
    comm.all_reduce(flat).wait()


def _model(name: str) -> dict[str, float]:
    """Return seconds of a micro-batch's halves and of a step, and the number of elements."""
    model, micro_batches = build(name, torch.float32, dist.get_rank())
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=True)
    times: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}

    def timed(part: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        times[part].append(time.perf_counter() - start)
        return result

    def step() -> None:
        nn.utils.clip_grad_norm_(params, _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        for x in micro_batches[: MICRO_BATCHES // 2]:
            loss = timed("forward", partial(model, x))
            timed("backward", loss.backward)
        timed("step", step)
    found = {part: statistics.median(taken) for part, taken in times.items()}
    return found | {"numel": float(sum(param.numel() for param in params))}
