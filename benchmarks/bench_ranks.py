"""Measure how cost grows with the number of ranks: python benchmarks/bench_ranks.py [--save].

Gloo ranks of one thread, each with 100 small parameters, share the machine's cores. With more ranks than
cores a time is work of all ranks and not waiting, so CPU seconds and counts say more than wall times. Making
an engine is compared with making DDP over the same model; a window of 4 micro-batches in one long loop with
DDP + no_sync with views. Contestants take turns. `control` is DDP once more: their difference is noise.

Counts need no clock: `rounds` are collectives by the sequence numbers of gloo's process groups, where a
reduction over a tree counts once; `wire` is the bytes that the kernel has sent over this rank's sockets,
gloo's own 72 bytes a message and the store included, and `bytes` are those of `Comm.traffic`; all of them the
most of any rank. For 64 to 4096 ranks, collectives and bytes come from the same engine on torch's fake
process group.
"""

import argparse
import cProfile
import importlib
import multiprocessing
import os
import pstats
import queue
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _harness import save
from bench_host import Attach, Engine, NoSyncView
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.cli.machine import card
from pyengine.comm import TorchDist
from pyengine.comm.base import Done, Traffic
from pyengine.comm.groups import GroupHandle
from pyengine.comm.torch_dist import PointToPoint, _launched_in
from pyengine.ops.device import HOST

NUM_PARAMS, ACCUMULATE, WIDTH, WARM_UP = 100, 4, 8, 4
# `first` makes an engine's own group; `again` and `attach` reuse it.
MADE = ("ddp", "first", "again", "attach", "control")
MANY = (64, 256, 1024, 4096)
TRAINED = {"ddp": NoSyncView, "control": NoSyncView, "engine": Engine, "attach": Attach}
# Offset of `tcpi_bytes_sent` in Linux's `struct tcp_info`.
_BYTES_SENT = 200
_DESCRIPTORS = "/proc/self/fd"


# ---- one rank ----


def sent_over_tcp() -> int:
    """Return the bytes that the open TCP sockets of this process have sent."""
    total = 0
    for name in os.listdir(_DESCRIPTORS):
        try:
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # no TCP socket, or closed by now
            continue
        total += struct.unpack_from("<Q", info, _BYTES_SENT)[0]
    return total


def rounds() -> int:
    """Return the collectives that this rank has launched in all process groups, each of all ranks."""
    groups = c10d._world.pg_map  # noqa: SLF001 - no public list
    numbers = sum(group._get_sequence_number_for_group() for group in groups)  # noqa: SLF001 - nor number
    # gloo numbers each point-to-point operation: one to and one from every neighbor in the tree.
    tree = PointToPoint(GroupHandle(None, HOST))
    return numbers - (2 * tree.num_neighbors - 1) * sum(_launched_in.values())


def traffic_of(sync: pe.Sync) -> Traffic:
    """Return what this rank has sent for an engine, making it included."""
    return sync._engine.comm.traffic  # noqa: SLF001 - records have windows only


class Meter:
    """Counts and measures one action on this rank."""

    def __init__(self) -> None:
        dist.barrier()
        self._rounds, self._wire = rounds(), sent_over_tcp()
        self._cpu, self._start = time.process_time(), time.perf_counter()

    def stop(self) -> dict[str, float]:
        taken = {
            "ms": 1e3 * (time.perf_counter() - self._start),
            "cpu_ms": 1e3 * (time.process_time() - self._cpu),
        }
        time.sleep(0.01)  # threads of gloo may still send
        return taken | {"rounds": rounds() - self._rounds, "wire": sent_over_tcp() - self._wire}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_PARAMS // 2)])


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(model(), gradient_as_bucket_view=True)


def measure_making() -> dict[str, dict[str, float]]:
    """Make each contestant once on a fresh default group."""
    first, again, over_ddp = model(), model(), ddp()
    makers: dict[str, Callable[[], Any]] = {
        "ddp": ddp,
        "first": lambda: pe.GradSync(first, accumulate=ACCUMULATE),
        "again": lambda: pe.GradSync(again, accumulate=ACCUMULATE),
        "attach": lambda: pe.attach(over_ddp, accumulate=ACCUMULATE),
        "control": ddp,
    }
    found = {}
    for name in MADE:
        meter = Meter()
        made = makers[name]()
        found[name] = meter.stop()
        if isinstance(made, pe.Sync):
            traffic = traffic_of(made)
            found[name] |= {"collectives": traffic.collectives, "bytes": traffic.bytes_sent}
            made.close()
    return found


def calls_of_making() -> dict[str, int]:
    """Return the number of Python calls that making takes."""
    found = {}
    for name, make in (("ddp", ddp), ("again", lambda: pe.GradSync(model(), accumulate=ACCUMULATE))):
        with cProfile.Profile() as profile:
            made = make()
        found[name] = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
        if isinstance(made, pe.Sync):
            made.close()
    return found


def measure_windows(windows: int) -> dict[str, list[dict[str, float]]]:
    """Train windows of every contestant in turn."""
    made = {name: kind(NUM_PARAMS, ACCUMULATE, torch.device("cpu")) for name, kind in TRAINED.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for number in range(windows + WARM_UP):
        names = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        for name in names:
            contestant = made[name]
            meter = Meter()
            contestant.window()
            row = meter.stop()
            if isinstance(contestant, Engine):
                record = contestant.sync.last_record
                row |= {"collectives": record.collectives, "bytes": record.bytes_on_wire}
            found[name].append(row)
    return {name: rows[WARM_UP:] for name, rows in found.items()}


def _rank(rank: int, world: int, port: Any, answers: Any, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        for _ in range(world - 1):
            port.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", port.get(), world, is_master=False)
    making: dict[str, list[dict[str, float]]] = {name: [] for name in MADE}
    for number in range(options.repeats + 1):  # the first one imports and warms up
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{number}", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=300),
        )
        dist.barrier()
        for name, row in measure_making().items():
            making[name] += [row] if number else []
        if number < options.repeats:
            dist.barrier()
            dist.destroy_process_group()
    calls = calls_of_making()
    windows = measure_windows(options.windows)
    answers.put((rank, making, windows, calls))
    dist.barrier()
    dist.destroy_process_group()


# ---- all ranks ----


def measure(world: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what making and a window cost on `world` ranks, by contestant."""
    context = multiprocessing.get_context("fork")
    port, answers = context.Queue(), context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, answers, options)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    rows: list[Any] = []
    while len(rows) < world:
        try:
            rows.append(answers.get(timeout=1.0))
        except queue.Empty:
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.kill()
                raise SystemExit("a rank has died") from None
    for process in ranks:
        process.join()
    making = {name: _summary([row[1][name] for row in rows]) for name in MADE}
    windows = {name: _summary([row[2][name] for row in rows]) for name in TRAINED}
    return {"making": making, "windows": windows, "python_calls": rows[0][3]}


def _summary(by_rank: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return min and median over repetitions: wall time of the last rank, CPU time of the mean rank, and the
    counts of the rank that has most.
    """
    times = list(zip(*by_rank, strict=True))  # by repetition
    wall = [max(row["ms"] for row in rows) for rows in times]
    cpu = [statistics.fmean(row["cpu_ms"] for row in rows) for rows in times]
    counts = [name for name in ("rounds", "wire", "collectives", "bytes") if name in times[0][0]]
    return {
        "min_ms": min(wall),
        "p50_ms": statistics.median(wall),
        "cpu_min_ms": min(cpu),
        "cpu_p50_ms": statistics.median(cpu),
    } | {name: statistics.median(max(row[name] for row in rows) for rows in times) for name in counts}


# ---- more ranks than there can be ----

# Collectives, and bytes that this rank sends for them.
Sent = tuple[int, int]


def count_traffic(
    kind: str, *, stall_after_s: float | None = 30.0, init_sync: bool = True
) -> dict[str, Sent]:
    """Make an engine and train two windows; return what this rank has sent, as the engine counts it."""
    built = model()
    forward, options = built, {"accumulate": ACCUMULATE, "stall_after_s": stall_after_s}
    if kind == "attach":
        forward = DistributedDataParallel(built, gradient_as_bucket_view=True, init_sync=init_sync)
        sync = pe.attach(forward, **options)
    else:
        sync = pe.GradSync(built, **options)
    traffic = traffic_of(sync)
    found = {"making": (traffic.collectives, traffic.bytes_sent)}
    batches = torch.ones(2 * ACCUMULATE, 2, WIDTH)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
    for name, window in zip(("first window", "window"), sync.windows(batches), strict=False):
        for x in window:
            sync.backward(forward(x).sum())
        sync.step(optimizer)
        found[name] = (sync.last_record.collectives, sync.last_record.bytes_on_wire)
    sync.close()
    return found


@contextmanager
def one_of_many(rank: int, world: int) -> Iterator[None]:
    """Let this process be one of ranks that all have the same, over gloo: sums are multiples of its own.

    torch's fake process group returns what it is given.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    make, launch = TorchDist.__init__, dist.all_reduce

    def init(self: TorchDist, *arguments: Any) -> None:
        make(self, *arguments)
        self.can_or = True
        self._point_to_point = PointToPoint(self.handle)

    def all_reduce(flat: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        return launch(summed(flat, op), op, **options)

    def over_tree(_: PointToPoint, flat: torch.Tensor, op: Any) -> Done:
        return Done(summed(flat, op))

    def summed(flat: torch.Tensor, op: Any) -> torch.Tensor:
        return flat.mul_(world) if op == dist.ReduceOp.SUM else flat

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        with (
            mock.patch.object(TorchDist, "__init__", init),
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(PointToPoint, "all_reduce", over_tree),
        ):
            yield
    finally:
        dist.destroy_process_group()


def account(kind: str, world: int, rank: int = 0) -> dict[str, Sent]:
    """Return what one of `world` ranks sends, without the others."""
    with one_of_many(rank, world):
        return count_traffic(kind, stall_after_s=None, init_sync=False)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4,8,16,32")
    parser.add_argument("--repeats", type=int, default=5, help="of making, each on a fresh default group")
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-ranks.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {}
    for world in map(int, options.ranks.split(",")):
        cases[str(world)] = found = measure(world, options)
        _print(world, found)
    accounted = {str(world): {kind: account(kind, world) for kind in ("engine", "attach")} for world in MANY}
    for world, kinds in accounted.items():
        for kind, sent in kinds.items():
            texts = [f"{name} {num} collectives, {size} bytes" for name, (num, size) in sent.items()]
            print(f"{world} ranks, {kind}, accounted a rank: {'; '.join(texts)}")
    if options.save:
        content = {"machine": card(1), "options": vars(options), "ranks": cases, "accounted": accounted}
        print("wrote", save("ranks", content))


def _print(world: int, found: dict[str, Any]) -> None:
    print(f"{world} ranks: minimum ms (x DDP), median, CPU ms a rank; counts a rank")
    for part in ("making", "windows"):
        peer = found[part]["ddp"]
        for name, row in found[part].items():
            times = " ".join(
                f"{row[key]:9.2f} ({row[key] / peer[key]:5.2f})"
                for key in ("min_ms", "p50_ms", "cpu_min_ms", "cpu_p50_ms")
            )
            counts = ", ".join(
                f"{row[key]:.0f} {key}" for key in ("rounds", "wire", "collectives", "bytes") if key in row
            )
            print(f"  {part:8}{name:8}{times}  {counts}", flush=True)
    print(f"  Python calls of making: {found['python_calls']}")


if __name__ == "__main__":
    main()
