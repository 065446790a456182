"""Compare pyengine's windows on XLA replicas with Accelerate, xm.optimizer_step and handwritten loops.

    make xla-env && .venv-xla/bin/python benchmarks/bench_xla.py [--replicas 2] [--accumulate 4] [--save]

Replicas are threads on XLA's CPU backend. tests/xla/replicas.py makes them launch programs with collectives
in turn, so that the times can be compared with one another. They say nothing about a TPU. Every round runs
all contestants, every second round in the opposite order. Counts are exact. `recorded` is the number of
recorded operations, on which the host spends its time here. `error` is the largest difference from the
parameters after float64 training on the global batch. `equal` says whether all replicas end with the same
bits.

Accelerate and `xm.reduce_gradients` do less than `GradSync`: they step with gradients that contain inf or
nan, and they lose the reduction if gradients are clipped. "by hand" is the minimal correct loop: it reduces
the sums once per window as new tensors. "by hand, skips" also leaves the parameters and the optimizer
unchanged if the norm is not finite.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "xla")]  # the environment contains only torch_xla
from _harness import save
from replicas import Replicas
from xla_cases import fill, waves

import pyengine as pe
from pyengine.cli.machine import card

WARM_UP = 4
MAX_NORM = 0.5
COLUMNS = (
    "collectives",
    "kilobytes",
    "executed",
    "recorded",
    "programs",
    "sent",
    "read",
    "p50_ms",
    "min_ms",
    "error",
    "equal",
)


@dataclass(frozen=True)
class Setting:
    """Settings of the training, which are the same for all contestants."""

    replicas: int
    accumulate: int
    width: int
    windows: int
    clip: bool


@dataclass
class Row:
    """The result of one replica: counts and times per window, after the warm-up.

    `programs` is the number of programs that the process compiled after set-up. A program without a
    collective is compiled once for each replica.
    """

    collectives: float
    kilobytes: float
    executed: float
    recorded: float
    programs: int
    sent: float
    read: float
    times: list[float]
    params: list[Tensor]


class _Tally:
    """Counts the collectives that this replica requests from torch_xla, until the process ends."""

    def __init__(self) -> None:
        import torch_xla.core.xla_model as xm

        self.calls = self.num_bytes = 0
        mine, before = threading.get_ident(), xm.all_reduce

        def counted(kind: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                self.calls += 1
                self.num_bytes += sum(t.nbytes for t in ([inputs] if isinstance(inputs, Tensor) else inputs))
            return before(kind, inputs, *args, **kwargs)

        xm.all_reduce = counted


def model_of(setting: Setting, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model, with the same parameters in every call."""
    width = setting.width
    layers = [nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)]
    model = nn.Sequential(*layers).to(dtype)
    fill(model)
    return model


def batch_of(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Return one micro-batch of eight items in float64."""
    return waves(8, 16, phase=rank + 10 * index), waves(8, 4, phase=5 + rank + 10 * index)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss."""
    return (model(x) - y).square().mean()


def optimizer_of(model: nn.Module, *, capturable: bool) -> torch.optim.Optimizer:
    """Return the optimizer that every contestant uses."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=capturable)


def ours(model: nn.Module, setting: Setting) -> Callable[[list[Any]], None]:
    """Train windows with `GradSync`."""
    sync = pe.GradSync(model, accumulate=setting.accumulate)
    optimizer = optimizer_of(model, capturable=True)

    def window(batches: list[Any]) -> None:
        for x, y in batches:
            with sync.accumulate():
                sync.backward(loss_of(model, x, y))
                if sync.is_sync_step:
                    if setting.clip:
                        sync.clip_grad_norm_(MAX_NORM)
                    sync.step(optimizer)

    return window


def accelerate(model: nn.Module, setting: Setting) -> Callable[[list[Any]], None]:
    """Train windows with Accelerate's `accumulate()`."""
    import torch_xla
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=setting.accumulate)
    optimizer = accelerator.prepare(optimizer_of(model, capturable=True))

    def window(batches: list[Any]) -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                if setting.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            torch_xla.sync()  # as Accelerate's data loader does

    return window


def every_micro_batch(model: nn.Module, setting: Setting) -> Callable[[list[Any]], None]:
    """Reduce in every micro-batch as torch_xla's examples do (`xm.reduce_gradients`); step after the last."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    optimizer = optimizer_of(model, capturable=True)

    def window(batches: list[Any]) -> None:
        for index, (x, y) in enumerate(batches, start=1):
            (loss_of(model, x, y) / setting.accumulate).backward()
            xm.reduce_gradients(optimizer)
            if index == setting.accumulate:
                if setting.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            torch_xla.sync()

    return window


def optimizer_step(model: nn.Module, setting: Setting) -> Callable[[list[Any]], None]:
    """Step in every micro-batch with `xm.optimizer_step`, which is a different training with more updates."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    optimizer = optimizer_of(model, capturable=True)

    def window(batches: list[Any]) -> None:
        for x, y in batches:
            loss_of(model, x, y).backward()
            xm.optimizer_step(optimizer)
            optimizer.zero_grad()
            torch_xla.sync()

    return window


def by_hand(model: nn.Module, setting: Setting) -> Callable[[list[Any]], None]:
    """Reduce the sums in `.grad` once per window, and step; this is correct, but does nothing else."""
    return _by_hand(model, setting, lambda optimizer, norm: optimizer.step())


def by_hand_skips(model: nn.Module, setting: Setting) -> Callable[[list[Any]], None]:
    """Do the same as `by_hand`, and undo the step on the device if the norm is not finite."""
    return _by_hand(model, setting, _step_or_take_back)


def _by_hand(
    model: nn.Module, setting: Setting, step: Callable[[torch.optim.Optimizer, Tensor], None]
) -> Callable[[list[Any]], None]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    params, optimizer = list(model.parameters()), optimizer_of(model, capturable=True)
    needs_norm = setting.clip or step is _step_or_take_back
    for param in params:
        param.grad = torch.zeros_like(param)
    torch_xla.sync()

    def window(batches: list[Any]) -> None:
        for index, (x, y) in enumerate(batches, start=1):
            (loss_of(model, x, y) / setting.accumulate).backward()
            if index == setting.accumulate:
                # If `.grad` itself were reduced in place and then clipped, the reduction would be lost.
                fresh = [param.grad.clone() for param in params]
                xm.all_reduce(xm.REDUCE_SUM, fresh, scale=1.0 / setting.replicas, pin_layout=False)
                for param, total in zip(params, fresh, strict=True):
                    param.grad.copy_(total)
                max_norm = MAX_NORM if setting.clip else float("inf")
                norm = nn.utils.clip_grad_norm_(params, max_norm) if needs_norm else torch.zeros(())
                step(optimizer, norm)
                optimizer.zero_grad(set_to_none=False)
            torch_xla.sync()

    return window


@torch.no_grad()
def _step_or_take_back(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Step; if the norm is not finite, restore the parameters and their optimizer states."""
    tensors = [
        tensor
        for param in optimizer.param_groups[0]["params"]
        for tensor in (param, *optimizer.state[param].values())
    ]
    old = [tensor.clone() for tensor in tensors]
    optimizer.step()
    for tensor, kept in zip(tensors, old, strict=True):
        tensor.copy_(torch.where(torch.isfinite(norm), tensor, kept))


CONTESTANTS = {
    "GradSync": ours,
    "by hand": by_hand,
    "by hand, skips": by_hand_skips,
    "Accelerate accumulate()": accelerate,
    "xm.reduce_gradients": every_micro_batch,
    "xm.optimizer_step": optimizer_step,
}


def work(rank: int, name: str, setting: Setting) -> Row:
    """Measure one contestant on one replica."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    model = model_of(setting).to(device)
    window = CONTESTANTS[name](model, setting)
    xm.wait_device_ops()
    compiled = _metrics()["programs"]
    times: list[float] = []
    for index in range(setting.windows):
        first = index * setting.accumulate
        batches = [
            tuple(t.float().to(device) for t in batch_of(rank, first + i)) for i in range(setting.accumulate)
        ]
        if index == WARM_UP:
            xm.wait_device_ops()
            tally, before = _Tally(), _metrics()
        start = time.perf_counter()
        window(batches)
        xm.wait_device_ops()
        times.append(time.perf_counter() - start)
    after, measured = _metrics(), setting.windows - WARM_UP
    share = measured * setting.replicas
    return Row(
        collectives=tally.calls / measured,
        kilobytes=tally.num_bytes / measured / 1e3,
        executed=(after["executed"] - before["executed"]) / share,
        recorded=(after["recorded"] - before["recorded"]) / share,
        programs=after["programs"] - compiled,
        sent=(after["sent"] - before["sent"]) / share,
        read=(after["read"] - before["read"]) / share,
        times=times[WARM_UP:],
        params=[param.detach().cpu() for param in model.parameters()],
    )


def _metrics() -> dict[str, int]:
    """Return torch_xla's counters of this process, summed over all its replicas."""
    import torch_xla.debug.metrics as met

    names = {
        "executed": "ExecuteTime",
        "recorded": "LazyTracing",
        "sent": "TransferToDeviceTime",
        "read": "TransferFromDeviceTime",
    }
    found = {key: met.metric_data(name) for key, name in names.items()}
    return {key: data[0] if data else 0 for key, data in found.items()} | {
        "programs": met.counter_value("UncachedCompile") or 0
    }


def reference(setting: Setting) -> list[Tensor]:
    """Train in float64 on the global batch; return the parameters."""
    model = model_of(setting, torch.float64)
    optimizer = optimizer_of(model, capturable=False)
    for index in range(setting.windows):
        optimizer.zero_grad()
        for rank in range(setting.replicas):
            for micro_batch in range(index * setting.accumulate, (index + 1) * setting.accumulate):
                loss = loss_of(model, *batch_of(rank, micro_batch))
                (loss / setting.accumulate / setting.replicas).backward()
        if setting.clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def summary(rows: list[Row], right: list[Tensor] | None) -> dict[str, float | bool | None]:
    """Return the table row of one contestant."""
    first = rows[0]
    slowest = [max(times) for times in zip(*(row.times for row in rows), strict=True)]
    errors = [(a.double() - b).abs().max().item() for a, b in zip(first.params, right or [], strict=False)]
    found = {key: value for key, value in asdict(first).items() if key in COLUMNS}
    return found | {
        "p50_ms": statistics.median(slowest) * 1e3,
        "min_ms": min(slowest) * 1e3,
        "error": max(errors, default=None),
        "equal": all(all(map(torch.equal, first.params, row.params)) for row in rows),
    }


def main() -> None:
    """Run the benchmark, print its results, and save them if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--windows", type=int, default=64, help=f"of which {WARM_UP} warm up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-xla.json")
    options = parser.parse_args()
    missing = [n for n in ("torch_xla", "accelerate") if importlib.util.find_spec(n) is None]
    if missing:
        parser.error(
            f"{' and '.join(missing)} missing here: make xla-env, and run it with .venv-xla/bin/python"
        )
    settings = [
        Setting(options.replicas, options.accumulate, options.width, options.windows, clip)
        for clip in (True, False)
    ]
    runs: dict[tuple[Setting, str], list[Row]] = {}
    for index in range(options.rounds):
        for key in [(s, name) for s in settings for name in CONTESTANTS][:: -1 if index % 2 else 1]:
            setting, name = key
            replicas = Replicas(setting.replicas, {})
            measured: list[Row] = replicas.run(work, name, setting)
            replicas.stop()
            for kept, row in zip(runs.setdefault(key, measured), measured, strict=True):
                kept.times += row.times if kept is not row else []
    rows: dict[str, dict[str, float | bool | None]] = {}
    print(f"{'':40}" + "".join(f"{column:>12}" for column in COLUMNS))
    for (setting, name), of_replicas in runs.items():
        right = reference(setting) if name != "xm.optimizer_step" else None
        found = summary(of_replicas, right)
        rows[f"{name}, {'clipped' if setting.clip else 'not clipped'}"] = found
        cells = [f"{found[c]:>12.4g}" if isinstance(found[c], int | float) else f"{'-':>12}" for c in COLUMNS]
        print(f"{list(rows)[-1]:40}" + "".join(cells), flush=True)
    if options.save:
        del options.save
        print("wrote", save("xla", {"machine": card(1), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
