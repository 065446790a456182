"""Options of Lightning that windows do not support, with the alternative for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule

Accumulate = int | Mapping[str, int]


def check_module(module: LightningModule, accumulate: Accumulate) -> None:
    """Refuse modules that run the backward themselves, or contradict the Trainer's numbers."""
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__} overrides backward, which the engine runs itself; remove it (under "
            "manual optimization call sync.micro_batch, or manual_backward with torch's options)"
        )
    if module.automatic_optimization and accumulate != 1:
        raise ValueError(
            f"accumulate={accumulate!r} on the strategy is for manual optimization; with Lightning's own "
            "loop it is Trainer(accumulate_grad_batches=...)"
        )
    if isinstance(accumulate, Mapping):
        known = {name for name, _ in module.named_modules()}
        unknown = [name for name in accumulate if name not in known or not name]
        if unknown or not accumulate:
            raise ValueError(
                f"accumulate={dict(accumulate)!r}: need names of submodules of {type(module).__name__}, each "
                f"with its micro-batches a window{f'; it has no {unknown[0]!r}' if unknown else ''}"
            )


def check_ddp(module: LightningModule, options: Mapping[str, Any], hooks: list[str]) -> None:
    """Refuse options of DDPStrategy that would have no effect.

    Args:
        module: the trained module.
        options: for DistributedDataParallel.
        hooks: names of the given options for communication hooks.
    """
    if hooks:
        raise ValueError(
            f"{', '.join(hooks)}: got one, and the engine registers its own hook; set `wire` instead"
        )
    unused = sorted({*options} - {"find_unused_parameters"})
    if unused and not module.automatic_optimization:
        raise ValueError(
            f"{', '.join(unused)}: an option of DDP, and manual optimization uses pe.GradSync instead, "
            "which supports unused parameters; leave it out"
        )
    sharded = [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    if sharded:
        raise TypeError(
            f"{type(module).__name__} has a module sharded by FSDP2 ({sharded[0]!r}), which DDP does not "
            "support: use ShardedWindowStrategy, and call fully_shard in configure_model"
        )


def sharded_part(module: LightningModule) -> nn.Module:
    """Return the one outermost sharded module inside a module.

    Raises:
        TypeError: there is none, or several, or a trained parameter is outside of it.
    """
    units = _outermost(module, "")
    kind = type(module).__name__
    if len(units) != 1:
        found = f"{len(units)} separate modules ({', '.join(map(repr, units))})" if units else "none"
        raise TypeError(
            f"fully_shard was called on {found} of {kind}, need one, whose forward training_step calls: call "
            "it in configure_model, after those of the blocks, on a module with all trained parameters"
        )
    ((name, unit),) = units.items()
    inside = {id(param) for param in unit.parameters()}
    outside = [
        key for key, param in module.named_parameters() if param.requires_grad and id(param) not in inside
    ]
    if outside:
        raise TypeError(
            f"{outside[0]!r} of {kind} is trained, and is outside of {name!r}, which fully_shard was called "
            "on: its gradient would not be reduced; shard a module that contains it, or freeze it"
        )
    return unit


def check_sharded(accumulate: Accumulate) -> None:
    """Refuse separate windows for sharded submodules of one module."""
    if isinstance(accumulate, Mapping):
        raise ValueError(  # noqa: TRY004 - another strategy accepts this type
            f"accumulate={dict(accumulate)!r} under FSDP2, which fixes at a submodule's first forward which "
            "parameters get gradients: toggle_optimizer could not exclude parameters of other submodules; "
            "use WindowStrategy, which does not shard, or one number for all"
        )


def check_trained(module: nn.Module, trained: Sequence[bool]) -> None:
    """Refuse parameters frozen or unfrozen since `trained` was recorded.

    FSDP2 would not notice the change.
    """
    now = [param.requires_grad for param in module.parameters()]
    if now != list(trained):
        names = [name for name, _ in module.named_parameters()]
        changed = [name for name, before, is_now in zip(names, trained, now, strict=True) if before != is_now]
        raise RuntimeError(
            f"{changed[0]!r} was frozen or unfrozen (toggle_optimizer, or toggle_model with several), "
            "and FSDP2 fixes at a module's first forward which parameters get gradients: do it in "
            "configure_model, or use WindowStrategy"
        )


def _outermost(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the outermost modules that `fully_shard` was called on, by name."""
    if isinstance(module, FSDPModule):
        return {name: module}
    found: dict[str, nn.Module] = {}
    for key, child in module.named_children():
        for inner, unit in _outermost(child, f"{name}.{key}".lstrip(".")).items():
            if not any(unit is other for other in found.values()):
                found[inner] = unit
    return found
