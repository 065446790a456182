"""What the Accelerate loop cannot honour, by name, and what to do in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from pyengine.gradients.settings import Settings

_PREPARED_ALONE = "what it returns would step without this model's windows; give its argument to prepare"
REFUSED = {
    "join_uneven_inputs": "windows need it not; ranks with different numbers of batches: `for window in "
    "accelerator.sync.windows(loader)`",
    "trigger_sync_in_backward": "windows need it not; several forwards before a backward need nothing",
    "no_sync": "gradients travel in a window's last backward only; leave it out",
    "lomo_backward": "it steps inside the backward, where no window has ended; choose another optimizer",
    "prepare_optimizer": _PREPARED_ALONE,
    "prepare_scheduler": _PREPARED_ALONE,
}
_REDUCES_ITSELF = {
    DistributedType.DEEPSPEED: "use FSDP2 or DDP",
    DistributedType.MEGATRON_LM: "use FSDP2 or DDP",
    DistributedType.XLA: "pe.GradSync drives XLA replicas itself (docs/xla.md)",
}


def check_loader(loader: Any) -> None:
    """Refuse a loader that ends at different places: a flat loop over one rank's batches cannot wait for the
    others.
    """
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while isinstance(sampler, SkipBatchSampler):
        sampler = sampler.batch_sampler
    if isinstance(sampler, BatchSamplerShard) and not sampler.even_batches:
        raise ValueError(
            "prepare: got a loader with even_batches=False, and this loop ends with its own rank's batches, "
            "where others may still wait for it; leave even_batches True, which pads, or prepare the loader "
            "by your own Accelerator and loop over `for window in accelerator.sync.windows(loader)`, in "
            "which ranks that have run out go on until all have"
        )


def check_accelerator(accelerator: Accelerator, settings: Settings) -> None:
    """Refuse what this loop cannot honour, before anything is prepared."""
    kind, steps = accelerator.distributed_type, accelerator.gradient_accumulation_steps
    if kind in _REDUCES_ITSELF:
        raise ValueError(
            f"accelerator: distributed_type is {kind.value}, which reduces its own gradients; need DDP, "
            f"FSDP2 or one process: {_REDUCES_ITSELF[kind]}"
        )
    problems = [*_parallel_problems(accelerator)]
    if kind == DistributedType.FSDP:
        problems += _plugin_problems(accelerator.state.fsdp_plugin, settings)
    if problems:
        raise ValueError(f"accelerator: {problems[0]}")
    if accelerator.scaler is not None and accelerator.mixed_precision != "fp16":
        raise ValueError(
            f"accelerator: mixed_precision={accelerator.mixed_precision!r} scales losses by rules of its "
            "own; use 'fp16', whose scaler the engine can take over, or 'bf16', which needs none"
        )
    if steps not in (1, settings.accumulate):
        raise ValueError(
            f"accelerator has gradient_accumulation_steps={steps}, and accumulate={settings.accumulate}: "
            "they are one number for a process and one for a model; leave the accelerator's out"
        )
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ValueError(
            "accelerator: sync_each_batch=True, but gradients travel once a window; leave it out"
        )
    hook = (
        DDPCommunicationHookType.NO if accelerator.ddp_handler is None else accelerator.ddp_handler.comm_hook
    )
    if hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"accelerator: DistributedDataParallelKwargs has comm_hook={hook.name}, and the engine "
            "registers its own; say how buckets travel by `wire`"
        )


def _parallel_problems(accelerator: Accelerator) -> Iterator[str]:
    """Say which ranks would share a batch, which the count of one rank does not tell."""
    config = accelerator.parallelism_config
    for name in () if config is None else ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(config, name) or 1) > 1:
            yield (
                f"ParallelismConfig has {name}={size}, and those ranks share a batch, which counts once: "
                "Accelerate's loop does not say so; use a loop of your own with "
                "pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(...)) (docs/mesh.md)"
            )


def _plugin_problems(plugin: Any, settings: Settings) -> Iterator[str]:
    """Say in Accelerate's words what `attach` refuses of an FSDP plugin, before the model is sharded."""
    where = "FullyShardedDataParallelPlugin"
    if plugin.fsdp_version != 2:
        yield (
            f"{where} has fsdp_version={plugin.fsdp_version}, and FSDP1 reduces gradients by itself, in "
            "every backward; pass fsdp_version=2"
        )
        return
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield f"{where} has cpu_offload, and gradients are needed where the model computes; leave it out"
    policy = plugin.mixed_precision_policy
    dtype = None if policy is None else policy.reduce_dtype or policy.param_dtype
    if dtype is None or settings.problems() or settings.kind == "exact":  # exact sums travel past FSDP
        return
    if settings.kind == "fp32" and dtype.itemsize < torch.float32.itemsize:
        yield (
            f"{where} sums gradients in {dtype} (mixed_precision chooses one type for everything), and "
            f"accumulator='fp32' asks for float32: pass it mixed_precision_policy=MixedPrecisionPolicy("
            f"param_dtype={policy.param_dtype}, reduce_dtype=torch.float32), or prepare accumulator='native' "
            f"with wire={dtype}"
        )
    elif dtype != settings.wire.dtype and dtype.itemsize <= settings.wire.dtype.itemsize:
        yield (
            f"{where} reduces in {dtype}, and wire={settings.wire}: a wire has to be of the type "
            f"that its policy's reduce_dtype says, or narrower; pass wire={dtype}, or a "
            f"mixed_precision_policy with reduce_dtype={settings.wire.dtype}"
        )
