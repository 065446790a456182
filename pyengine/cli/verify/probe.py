"""The object that `verify` passes to a training function; it records every optimizer step as digests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pyengine.cli.target import Enough
from pyengine.engine.attach import attach
from pyengine.engine.grad_sync import GradSync
from pyengine.engine.sync import Sync
from pyengine.gradients.settings import Accumulator, Exact
from pyengine.ops.device import HOST
from pyengine.step.step_record import StepRecord

# Kinds of entries in the order in which a step records them, with a template that describes an entry.
KINDS = {
    "window": "the items of the {}",
    "buffer": "buffer {}",
    "gradient": "gradient of {}",
    "norm": "the gradient {}",
    "parameter": "parameter {}",
    "state": "optimizer state {}",
}
START = -1  # Step number of what is recorded before the first step.
# The owners of the gradients, in this order: the engine's buckets; DDP; FSDP shards of each `ModuleList`
# layer and of the model, over all workers; and the same FSDP shards in 2 replicas.
WRAPS = ("own", "ddp", "fsdp", "hsdp")


def needs(wrap: str, workers: int) -> str:
    """Return the reason why a wrap does not support a number of workers; empty if it does."""
    return "2 replicas of shards need an even number of workers" if wrap == "hsdp" and workers % 2 else ""


@dataclass(frozen=True)
class Run:
    """The settings of one training run."""

    label: str  # the name in tables
    workers: int
    steps: int
    micro_batches: int
    accumulator: Accumulator
    wrap: str  # One of `WRAPS`.
    last: int  # The step after which training ends.
    keep: int | None = None  # Rank whose tensors of step `last` are kept; None keeps only digests.


@dataclass
class Trace:
    """The digests that one rank has recorded."""

    # Digests by (step, kind, name); entries of the kind "window" are plain text instead.
    entries: dict[tuple[int, str, str], str] = field(default_factory=dict)
    # The tensors selected by `Run.keep`, by (kind, name).
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    steps: int = 0  # Number of recorded steps.
    is_wrapped: bool = False  # Whether the function has called `wrap`.
    stopped: str = ""  # The error that ended the function before its last step.


class VerifyProbe:
    """Records the steps of a training function.

    Args:
        run: the settings of the run.

    Attributes:
        steps, micro_batches, accumulator: values from the command line, which the function has to follow.
        trace: the digests recorded so far.
    """

    def __init__(self, run: Run) -> None:
        self.steps, self.micro_batches, self.accumulator = run.steps, run.micro_batches, run.accumulator
        self.trace = Trace()
        self._run = run
        self._step = START
        self._is_watching = False

    def wrap(
        self, model: nn.Module, *, accumulate: int, accumulator: Accumulator | Exact = "exact"
    ) -> tuple[Sync, nn.Module]:
        """Wrap a model as `--wrap` specifies, by default in an engine that owns its buckets.

        Args:
            model: the unwrapped model; create the optimizer after this call.
            accumulate, accumulator: see `pe.attach`.

        Returns:
            The engine, and the module to call for the forward pass.
        """
        self.trace.is_wrapped = True
        wrap = self._run.wrap
        if wrap == "own":
            return GradSync(model, accumulate=accumulate, accumulator=accumulator), model
        if wrap == "ddp":
            ddp = DistributedDataParallel(model)
            return attach(ddp, accumulate=accumulate, accumulator=accumulator), ddp
        from torch.distributed.fsdp import fully_shard  # imported late: other wraps do not need it

        world, kind = dist.get_world_size(), next(model.parameters()).device.type
        shape = (world,) if wrap == "fsdp" else (2, world // 2)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return attach(model, accumulate=accumulate, accumulator=accumulator), model

    def watch(self, model: nn.Module, *, optimizer: Optimizer, sync: Sync | None = None) -> None:
        """Record the model now, and every step of the optimizer; call this method once, before the loop.

        Args:
            model: the model that is trained: unwrapped, in DDP or sharded.
            optimizer: gradients are recorded before its steps, and all other values after its steps.
            sync: the engine, whose step records contain the norm and item count; None without an engine.

        Raises:
            RuntimeError: the method has already been called.
        """
        if self._is_watching:
            raise RuntimeError(
                "verify.watch was called twice, but it records one model and one optimizer: call it only for "
                "the model to compare, or put several models into a ModuleDict"
            )
        self._is_watching = True
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer, self._has_sync = optimizer, sync is not None
        self._note_all("parameter", self._model.named_parameters())
        self._note_all("buffer", self._model.named_buffers())
        self._advance()
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        if sync is not None:
            sync.on_step(self._on_step)

    def _before(self, *_: object) -> None:
        self._note_all("gradient", ((name, param.grad) for name, param in self._model.named_parameters()))

    def _after(self, *_: object) -> None:
        self._note_all("buffer", self._model.named_buffers())
        self._note_all("parameter", self._model.named_parameters())
        for name, param in self._model.named_parameters():
            self._note_all("state", _tensors(name, self._optimizer.state.get(param, {})))
        if not self._has_sync:
            self._advance()

    def _on_step(self, record: StepRecord) -> None:
        skipped = ", skipped" if record.skipped else ""
        text = f"{record.micro_batches} micro-batches, {record.count:.17g} items{skipped}"
        self.trace.entries[self._step, "window", "window"] = text
        self._note_all("norm", [("norm", torch.tensor(record.grad_norm, dtype=torch.float64, device=HOST))])
        self._advance()

    def _note_all(self, kind: str, tensors: Any) -> None:
        for name, tensor in tensors:
            if tensor is None:
                continue
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            self.trace.entries[self._step, kind, name] = digest(whole)
            if self._step == self._run.last and dist.get_rank() == self._run.keep:
                self.trace.tensors[kind, name] = whole.detach().cpu().clone()

    def _advance(self) -> None:
        self.trace.steps = self._step + 1
        if self._step == self._run.last:
            raise Enough
        self._step += 1


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bits."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    hashed = blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    hashed.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and numbers in the optimizer state of one parameter."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(value, dtype=torch.float64, device=HOST)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _tensors(f"{name}.{index}", part)
