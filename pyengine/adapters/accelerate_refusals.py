"""Options of Accelerate that windows do not support, with the alternative for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from pyengine.gradients.settings import Settings

_PREPARED_ALONE = "its result would step without this model's windows; pass its argument to prepare"
REFUSED = {
    "join_uneven_inputs": "windows do not need it; for ranks with different numbers of batches use "
    "`for window in accelerator.sync.windows(loader)`",
    "trigger_sync_in_backward": "windows do not need it; several forwards may precede a backward",
    "no_sync": "gradients are reduced in a window's last backward only; leave it out",
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
    """Refuse a loader that ends at different batches on different ranks.

    A flat loop over one rank's batches cannot wait for the others.
    """
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while isinstance(sampler, SkipBatchSampler):
        sampler = sampler.batch_sampler
    if isinstance(sampler, BatchSamplerShard) and not sampler.even_batches:
        raise ValueError(
            "prepare: got a loader with even_batches=False, and this loop ends with its own rank's batches, "
            "while others may still wait for it; leave even_batches True, which pads, or prepare the loader "
            "with your own Accelerator and loop over `for window in accelerator.sync.windows(loader)`, "
            "where ranks without data continue until all have ended"
        )


def check_accelerator(accelerator: Accelerator, settings: Settings) -> None:
    """Refuse options that this loop does not support, before anything is prepared."""
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
            f"accelerator: mixed_precision={accelerator.mixed_precision!r} has its own rules of loss "
            "scaling; use 'fp16', whose scaler the engine can replace, or 'bf16', which needs none"
        )
    if steps not in (1, settings.accumulate):
        raise ValueError(
            f"accelerator has gradient_accumulation_steps={steps}, and accumulate={settings.accumulate}: "
            "the first is for the process, the second for this model; leave the accelerator's out"
        )
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ValueError(
            "accelerator: sync_each_batch=True, but gradients are reduced once a window; leave it out"
        )
    hook = (
        DDPCommunicationHookType.NO if accelerator.ddp_handler is None else accelerator.ddp_handler.comm_hook
    )
    if hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"accelerator: DistributedDataParallelKwargs has comm_hook={hook.name}, and the engine "
            "registers its own; pass `wire` instead"
        )


def _parallel_problems(accelerator: Accelerator) -> Iterator[str]:
    """Yield messages for ranks that would share a batch, which their counts do not show."""
    config = accelerator.parallelism_config
    for name in () if config is None else ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(config, name) or 1) > 1:
            yield (
                f"ParallelismConfig has {name}={size}, and those ranks share a batch, which has to be "
                "counted once: Accelerate's loop counts it on each rank; use your own loop with "
                "pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(...)) (docs/mesh.md)"
            )


def _plugin_problems(plugin: Any, settings: Settings) -> Iterator[str]:
    """Yield messages for FSDP plugin options that `attach` refuses, before the model is sharded."""
    where = "FullyShardedDataParallelPlugin"
    if plugin.fsdp_version != 2:
        yield (
            f"{where} has fsdp_version={plugin.fsdp_version}, and FSDP1 reduces gradients itself in every "
            "backward; pass fsdp_version=2"
        )
        return
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield f"{where} has cpu_offload, and gradients are needed on the model's device; leave it out"
    policy = plugin.mixed_precision_policy
    dtype = None if policy is None else policy.reduce_dtype or policy.param_dtype
    if dtype is None or settings.problems() or settings.kind == "exact":  # exact sums bypass FSDP
        return
    if settings.kind == "fp32" and dtype.itemsize < torch.float32.itemsize:
        yield (
            f"{where} sums gradients in {dtype} (mixed_precision sets one dtype for everything), and "
            f"accumulator='fp32' asks for float32: pass it mixed_precision_policy=MixedPrecisionPolicy("
            f"param_dtype={policy.param_dtype}, reduce_dtype=torch.float32), or prepare accumulator='native' "
            f"with wire={dtype}"
        )
    elif dtype != settings.wire.dtype and dtype.itemsize <= settings.wire.dtype.itemsize:
        yield (
            f"{where} reduces in {dtype}, and wire={settings.wire}: need a wire of the dtype of its "
            f"policy's reduce_dtype, or a narrower one; pass wire={dtype}, or a "
            f"mixed_precision_policy with reduce_dtype={settings.wire.dtype}"
        )
