"""The variants of the window benchmark, which train the same model on the same micro-batches.

A window consists of the forward and backward of A micro-batches, the reduction, unscaling, clipping and the
optimizer step. Other libraries are used as their documentation recommends, with the loss divided by A.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.cli.bench.models import needs_scale
from pyengine.wire.named import WIRES

MAX_NORM = 0.5
PHASES = ("early", "last", "epilogue", "optimizer")  # Phases of a window.
# Optimizers by the value of a variant's `optimizer` argument.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": partial(torch.optim.AdamW, lr=1e-5, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-5),
}


class Variant:
    """One way to train the model."""

    label: ClassVar[str]  # Name in tables.
    needs: ClassVar[str | None] = None  # Package that the variant requires, besides torch and pyengine.
    is_synced: ClassVar[bool] = True  # Whether all ranks end a window with the same gradient.
    is_whole: ClassVar[bool] = True  # Whether that gradient is the window's full gradient, up to rounding.
    is_ours: ClassVar[bool] = False  # Whether the variant is an engine of pyengine.
    grad_norm: Tensor  # Gradient norm of the last window, before clipping.

    def __init__(self, model: nn.Module, micro_batches: list[Tensor], optimizer: str) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.forward: Callable[[Tensor], Tensor] = model
        self.device = next(model.parameters()).device
        self.optimizer: Any = OPTIMIZERS[optimizer](model.parameters())
        self.is_scaled = needs_scale(model)
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1024.0, enabled=self.is_scaled)
        self.setup()

    def setup(self) -> None:
        """Wrap the model."""

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        del last
        self.scaler.scale(self.forward(x) / len(self.micro_batches)).backward()

    def epilogue(self) -> Tensor:
        """Unscale and clip; return the norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def window(self) -> dict[str, float]:
        """Train one window; return the host time of each phase and of the whole window, in seconds."""
        return by_phase(self.marks(time.perf_counter), lambda begin, end: end - begin)

    def marks(self, now: Callable[[], Any]) -> list[Any]:
        """Train one window; return `now()` at the start and after each phase."""
        marks = [now()]
        *early, last = self.micro_batches
        for x in early:
            self.micro_batch(x, last=False)
        marks.append(now())
        self.micro_batch(last, last=True)
        marks.append(now())
        self.grad_norm = self.epilogue()
        marks.append(now())
        self.step()
        return [*marks, now()]


def by_phase(marks: list[Any], seconds: Callable[[Any, Any], float]) -> dict[str, float]:
    """Return the seconds of each phase and of the whole window."""
    phases = {name: seconds(a, b) for name, a, b in zip(PHASES, marks, marks[1:], strict=False)}
    return phases | {"window": seconds(marks[0], marks[-1])}


class Floor(Variant):
    label = "no communication at all"
    is_synced = False


class DDP(Variant):
    label = "DDP, sync every micro-batch"
    view = False
    bucket_cap_mb: int | None = None  # None for DDP's default
    hook: Any = None

    def setup(self) -> None:
        self.ddp = DistributedDataParallel(
            self.model,
            device_ids=None if self.device.index is None else [self.device.index],
            gradient_as_bucket_view=self.view,
            bucket_cap_mb=self.bucket_cap_mb,
        )
        if self.hook is not None:
            self.ddp.register_comm_hook(None, self.hook)
        self.forward = self.ddp


class NoSync(DDP):
    label = "DDP + no_sync"

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        with contextlib.nullcontext() if last else self.ddp.no_sync():
            super().micro_batch(x, last=last)


class NoSyncView(NoSync):
    label = "DDP + no_sync, bucket views"
    view = True


class NoSyncBF16(NoSyncView):
    label = "DDP + no_sync, views, bf16 hook"
    # A lambda, because DDP rejects torch's `bf16_compress_hook` on gloo, but only by its name.
    hook = staticmethod(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))


class NoSyncFP16(NoSyncView):
    label = "DDP + no_sync, views, fp16 hook"
    hook = staticmethod(default_hooks.fp16_compress_hook)


class NoSyncPowerSGD(NoSyncView):
    """DDP with `no_sync`, bucket views and, from the third window on, torch's rank-1 PowerSGD hook.

    A single bucket is used, because the hook launches its later collectives from the backend's threads. With
    several buckets, ranks would launch these collectives in different orders, and gloo would end the process.
    """

    label = "DDP + no_sync, views, PowerSGD"
    bucket_cap_mb = 2**20

    def setup(self) -> None:
        super().setup()
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Accelerate(Variant):
    label = "Accelerate"
    needs = "accelerate"

    def setup(self) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from accelerate.utils import GradientAccumulationPlugin

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # noqa: SLF001 - nothing public resets an earlier state
        plugin = GradientAccumulationPlugin(num_steps=len(self.micro_batches), sync_with_dataloader=False)
        self.accelerator = Accelerator(cpu=self.device.type == "cpu", gradient_accumulation_plugin=plugin)
        # Accelerate's prepared optimizer wraps `self.optimizer`. All variants step `self.optimizer` directly.
        self.forward, _ = self.accelerator.prepare(self.model, self.optimizer)

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        with self.accelerator.accumulate(self.forward):
            self.accelerator.backward(self.scaler.scale(self.forward(x)))


class Engine(Variant):
    label = "GradSync"
    is_ours = True
    wire: pe.wire.Wire = pe.wire.FP32()
    accumulator = "fp32"
    shared_memory = False

    def make(self) -> pe.Sync:
        return pe.GradSync(self.model, **self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that `GradSync` and `attach` share."""
        return {
            "accumulate": len(self.micro_batches),
            "wire": self.wire,
            "accumulator": self.accumulator,
            "shared_memory": self.shared_memory,
        }

    def setup(self) -> None:
        self.sync = self.make()
        if self.is_scaled:
            self.sync.scaler = pe.GradScaler(self.device.type, init_scale=1024.0)

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        with self.sync.accumulate():
            self.sync.backward(self.forward(x))

    def epilogue(self) -> Tensor:
        return self.sync.clip_grad_norm_(MAX_NORM)

    def step(self) -> None:
        self.sync.step(self.optimizer)


class Attach(Engine):
    label = "attach"

    def make(self) -> pe.Sync:
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.forward = self.ddp
        return pe.attach(self.ddp, **self.arguments())


class _Slots(Engine):
    """Exact sums with one slot (group of micro-batches) per rank, and one addition per window."""

    def arguments(self) -> dict[str, Any]:
        world = dist.get_world_size()
        slots = pe.Exact(micro_batches=world * len(self.micro_batches), slots=world)
        return super().arguments() | {"accumulator": slots}


def _kinds(name: str, base: type[Engine]) -> dict[str, type[Variant]]:
    """Return the variants of an engine by name: other accumulators, shared memory, and every other wire."""

    def kind(label: str, *bases: type[Engine], **settings: Any) -> type[Variant]:
        label = f"{base.label}, {label}"
        return type(base.__name__, (*bases, base), {"label": label, **settings})

    return {
        f"{name}_native_bf16": kind("native sums, bf16 wire", wire=WIRES["bf16"], accumulator="native"),
        f"{name}_exact": kind("exact sums", accumulator="exact"),
        f"{name}_exact_slots": kind("exact sums, one slot per rank", _Slots),
        f"{name}_shared": kind("shared memory", shared_memory=True),
    } | {
        f"{name}_{wire.replace('-', '_')}": kind(f"{wire} wire", wire=WIRES[wire])
        for wire in WIRES
        if wire != "fp32"
    }


VARIANTS: dict[str, type[Variant]] = {
    "floor": Floor,
    "ddp": DDP,
    "no_sync": NoSync,
    "no_sync_view": NoSyncView,
    "no_sync_bf16": NoSyncBF16,
    "no_sync_fp16": NoSyncFP16,
    "no_sync_powersgd": NoSyncPowerSGD,
    "accelerate": Accelerate,
    "engine": Engine,
    "attach": Attach,
    **_kinds("engine", Engine),
    **_kinds("attach", Attach),
}
