"""Accelerate's training loop with pyengine windows, under Accelerate's method names.

`backward`, `accumulate`, `clip_grad_norm_` and `step` keep their names. Accelerate stores the end of a
window, the number of micro-batches and `sync_gradients` in one process-wide object, divides every loss by a
fixed number, and averages over ranks without weighting by item counts. With pyengine windows, this state
belongs to the engine of one model. The loader passed to `prepare` determines where a window ends, and
gradients are divided by the number of counted items.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pyengine.adapters.engine_for import backward, engine_for
from pyengine.engine.sync import Sync
from pyengine.gradients.fsdp.deferral import Defer, Deferral
from pyengine.gradients.fsdp.private import reduce_dtype_of
from pyengine.gradients.settings import Accumulator, NonFinite, Settings, as_accumulator
from pyengine.step.grad_scaler import GradScaler
from pyengine.step.window_optimizer import WindowOptimizer
from pyengine.window.header import Count
from pyengine.wire import FP32
from pyengine.wire.named import WireLike, as_wire

try:
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, DataLoaderStateMixin, SkipBatchSampler
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DDPCommunicationHookType, DistributedType
except ImportError as error:
    raise ImportError(
        "pyengine.adapters.accelerate needs accelerate, which is not installed: pip install '.[adapters]' "
        "in a clone of pyengine"
    ) from error


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    accumulate: int,
    wire: WireLike = FP32(),  # noqa: B008 - frozen
    accumulator: Accumulator | torch.dtype = "fp32",
    nonfinite: NonFinite = "skip",
    defer: Defer = "all",
    defer_budget_mb: float | None = None,
) -> tuple[Any, ...]:
    """Prepare a model, its optimizers, loaders and schedulers, as `accelerator.prepare` does.

    The model gets a separate engine, with its own windows.

    Args:
        accelerator: an accelerator for a single process, DDP, or FSDP2
            (`FullyShardedDataParallelPlugin(fsdp_version=2)`), in fp32, bf16 or fp16; or the
            `WindowAccelerator` that an earlier `prepare` returned. The accelerator's
            `gradient_accumulation_steps` must be 1 or equal to `accumulate`.
        objects: one model, its optimizers and schedulers, and its training loaders, in any order. The objects
            may already be prepared. The last window ends when its loader ends. For another model, call
            `prepare` again to get another accelerator.
        accumulate, wire, accumulator, nonfinite: see `pe.GradSync`.
        defer, defer_budget_mb: for a model under FSDP2, see `pe.attach`.

    Returns:
        A `WindowAccelerator`, which replaces `accelerator` for this model, and then the prepared objects in
        the order of the arguments.

    Raises:
        ValueError: an option is not supported, or the objects do not belong together.
        TypeError: the first argument is not an accelerator, or the prepared model is a compiled DDP model.

    Cost: see `pe.attach` for several processes, and `pe.GradSync` for one process.

    Example:
        >>> accelerator, model, optimizer, loader = prepare(  # doctest: +SKIP
        ...     Accelerator(), model, optimizer, loader, accumulate=4
        ... )
        >>> for x, y in loader:  # doctest: +SKIP
        ...     with accelerator.accumulate(model):
        ...         loss = cross_entropy(model(x), y, reduction="sum")
        ...         accelerator.backward(loss, count=y.numel())  # or accelerator.backward(mean_loss)
        ...         if accelerator.sync_gradients:
        ...             accelerator.clip_grad_norm_(model.parameters(), 1.0)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    if isinstance(accelerator, WindowAccelerator):  # the caller prepares another model
        accelerator = accelerator.wrapped
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            "pass the Accelerator first: prepare(accelerator, model, optimizer, loader, accumulate=...); got "
            f"a {type(accelerator).__name__}"
        )
    settings = Settings(accumulate, as_wire(wire), as_accumulator(accumulator), nonfinite)
    windows = WindowAccelerator(accelerator, settings, Deferral(defer, defer_budget_mb))
    prepared = windows.prepare(*objects)
    return (windows, *prepared) if isinstance(prepared, tuple) else (windows, prepared)


_PREPARED_ALONE = "the result would not step with this model's windows; pass the object to prepare instead"
_REFUSED = {
    "join_uneven_inputs": "windows do not need it; for ranks with different numbers of batches use "
    "`for window in accelerator.sync.windows(loader)`",
    "trigger_sync_in_backward": "windows do not need it; several forwards may precede a backward",
    "no_sync": "gradients are reduced in a window's last backward only; leave it out",
    "lomo_backward": "it steps inside the backward, before the window has ended; choose another optimizer",
    "prepare_optimizer": _PREPARED_ALONE,
    "prepare_scheduler": _PREPARED_ALONE,
}
_REDUCES_ITSELF = {
    DistributedType.DEEPSPEED: "use FSDP2 or DDP",
    DistributedType.MEGATRON_LM: "use FSDP2 or DDP",
    DistributedType.XLA: "use pe.GradSync, which drives XLA replicas itself (docs/xla.md)",
}


def _refuse_sync_gradients(value: object) -> NoReturn:
    raise AttributeError(
        f"sync_gradients={value}: a window ends when it is full or when the loader ends; to end a window "
        "earlier, run its last micro-batch inside `with accelerator.sync.accumulate(last=True):`"
    )


def _refuse_no_sync() -> NoReturn:
    raise RuntimeError(
        "leave out LocalSGD and model.no_sync(): gradients are reduced in a window's last backward, and "
        "every rank steps with their mean, so there are no local steps; for fewer reductions, prepare with a "
        "larger accumulate"
    )


_OWN = frozenset({"sync", "_accelerator", "_settings", "_deferral", "_model", "_loaders", "_optimizers"})


class WindowAccelerator:
    """An accelerator for one model; all other attributes come from the wrapped accelerator.

    Args:
        accelerator: the wrapped accelerator.
        settings, deferral: settings of the engine.

    Attributes:
        sync: the model's engine, with `on_step`, `state_dict` and `flush`; available after `prepare`.
    """

    def __init__(self, accelerator: Accelerator, settings: Settings, deferral: Deferral) -> None:
        check_accelerator(accelerator, settings)
        self._accelerator, self._settings, self._deferral = accelerator, settings, deferral
        self._model: nn.Module | None = None
        self._loaders: list[DataLoaderStateMixin] = []
        self._optimizers: list[AcceleratedWindowOptimizer] = []

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per full window; set this between windows, to the same value on every rank."""
        return self._settings.accumulate if self._model is None else self.sync.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if self._model is None:  # a later `prepare` creates the engine with this value
            self._settings = replace(self._settings, accumulate=steps)
        else:
            self.sync.gradient_accumulation_steps = steps

    @property
    def wrapped(self) -> Accelerator:
        return self._accelerator

    @property
    def sync_gradients(self) -> bool:
        return self.sync.is_sync_step

    @property
    def gradient_state(self) -> Any:
        """Accelerate's `GradientState`; after `prepare` it marks the ends of this model's windows."""
        state = self._accelerator.gradient_state
        return state if self._model is None else WindowBoundary(self.sync, state)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of this model's engine in fp16; other models use the accelerator's scaler."""
        return self.sync.scaler

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does; optimizers and schedulers step at the end of a window."""
        self._check_one_model(objects)
        evaluated = [item for item in objects if getattr(item, "_is_accelerate_prepared", False)]
        prepared = self._accelerator.prepare(*objects, device_placement=device_placement)
        prepared = (prepared,) if len(objects) == 1 else tuple(prepared)  # FSDP2 returns a list
        for item in prepared:
            if isinstance(item, nn.Module):
                self._check_model(item, is_old=any(item is other for other in evaluated))
                if self._model is None:
                    scaler, deferral = self._accelerator.scaler, self._deferral
                    self.sync: Sync = engine_for(item, self._settings, scaler=scaler, deferral=deferral)
                    self._model = item
                    if isinstance(item, DistributedDataParallel):
                        item.no_sync = _refuse_no_sync  # type: ignore[method-assign]  # LocalSGD calls it
                    if self.sync.scaler is not None:
                        self._accelerator.register_for_checkpointing(self.sync.scaler)
        # Schedulers come last because they look up their optimizer.
        kinds = (
            (DataLoaderStateMixin, self._loader),
            (AcceleratedOptimizer, self._optimizer),
            (AcceleratedScheduler, self._scheduler),
        )
        for kind, own in kinds:
            prepared = tuple(own(item) if isinstance(item, kind) else item for item in prepared)
        return prepared if len(prepared) > 1 else prepared[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare this accelerator's model, or a model for evaluation only, which gets no engine."""
        if evaluation_mode:
            return self._accelerator.prepare_model(model, device_placement, evaluation_mode)
        return self.prepare(model, device_placement=None if device_placement is None else [device_placement])

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Prepare a loader; the last window ends when the loader ends."""
        return self._loader(self._accelerator.prepare_data_loader(data_loader, *args, **options))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader for the remaining batches; the last window ends when the loader ends."""
        return self._loader(self._accelerator.skip_first_batches(dataloader, num_batches))

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Wrap one micro-batch, which ends the window if the window is full or the loader has ended."""
        if any(model is not self._model for model in models):
            raise ValueError(
                "accumulate: got a model that this accelerator did not prepare; every model has its own "
                "accelerator: `with accelerator_a.accumulate(a), accelerator_b.accumulate(b):`"
            )
        if not self._loaders:
            raise RuntimeError(
                "accumulate: no loader was prepared, so the end of a short last window is unknown: pass the "
                "loader to prepare, or set the end yourself: `with accelerator.sync.accumulate(last=...):`"
            )
        state = self._accelerator.gradient_state
        running = [loader for loader in state.dataloader_references if loader is not None]
        # accelerate.skip_first_batches creates another loader for the same dataset.
        datasets = [loader.dataset for loader in self._loaders]
        mine = [loader for loader in running if any(loader.dataset is each for each in datasets)]
        if running and not mine:
            raise RuntimeError(
                "accumulate: this accelerator did not prepare the loader that this loop iterates over, so "
                "the end of a short last window is unknown: pass that loader to this accelerator's prepare"
            )
        has_ended = any(loader.end_of_dataloader for loader in mine)
        return self.sync.accumulate(last=state.sync_with_dataloader and has_ended)

    def backward(self, loss: Tensor, *, count: Count | None = None, **options: Any) -> None:
        """Run the backward of one micro-batch, for a mean loss or a loss summed over `count` items.

        `options` are the options of `Tensor.backward`. Inside `with accelerator.sync.micro_batch(count=n):`
        this method may be called several times.
        """
        backward(self.sync, loss, count=count, options=options)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradient norm at the end of a window.

        Works like `pe.Sync.clip_grad_norm_` if `parameters` contains all trained parameters of the model.
        """
        self._check_end("clip_grad_norm_")
        clipped: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if norm_type in (2, math.inf) and self._is_whole(clipped):
            return self.sync.clip_grad_norm_(max_norm, norm_type)
        self.sync.flush()
        return nn.utils.clip_grad_norm_(clipped, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        self._check_end("clip_grad_value_")
        clipped: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._is_whole(clipped):
            self.sync.clip_grad_value_(clip_value)
        else:
            self.sync.flush()
            nn.utils.clip_grad_value_(clipped, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Wait until `.grad` holds the mean gradient, which may be read or changed before the step."""
        del optimizer  # an engine has one divisor for all optimizers
        self._check_end("unscale_gradients")
        self.sync.flush()

    def end_training(self) -> None:
        """End all trackers; on an accelerator device, first emit the record of the last step."""
        if self._model is not None:
            self.sync.synchronize()
        self._accelerator.end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine and free memory as Accelerate does.

        Afterwards you can prepare another model, or the same model again.
        """
        if self._model is not None:
            vars(self._model).pop("no_sync", None)  # restores DDP's own method
            sync, self._model, self._loaders, self._optimizers = self.sync, None, [], []
            self._settings = replace(self._settings, accumulate=sync.gradient_accumulation_steps)
            if sync.scaler is not None:  # the next engine starts from the scaler's state
                self._accelerator.scaler.load_state_dict(sync.scaler.state_dict())
                # No method undoes `register_for_checkpointing`.
                self._accelerator._custom_objects.remove(sync.scaler)  # noqa: SLF001
            sync.close()
            del self.sync
        return self._accelerator.free_memory(*objects)

    def clear(self, *objects: Any) -> Any:
        return self.free_memory(*objects)

    def __getattr__(self, name: str) -> Any:
        if name == "sync":
            raise RuntimeError("no model has been prepared: pass the model to prepare, too")
        if name in _REFUSED:
            raise AttributeError(f"{name}: {_REFUSED[name]}")
        return getattr(self._accelerator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sync_gradients":
            _refuse_sync_gradients(value)
        if name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._accelerator, name, value)

    def _check_end(self, call: str) -> None:
        """Raise RuntimeError unless the window has ended, because gradients are incomplete until then."""
        if not self.sync_gradients:
            raise RuntimeError(
                f"{call}: put this call under `if accelerator.sync_gradients:`; this micro-batch is not the "
                "last of its window, so the gradients are incomplete sums of this rank alone"
            )

    def _is_whole(self, params: Sequence[Tensor]) -> bool:
        assert self._model is not None
        trained = {id(param) for param in self._model.parameters() if param.requires_grad}
        return {*map(id, params)} >= trained

    def _check_model(self, model: nn.Module, *, is_old: bool) -> None:
        """Raise RuntimeError for a model prepared for evaluation, which Accelerate would not wrap in DDP."""
        is_reduced = isinstance(model, DistributedDataParallel | FSDPModule)
        if is_old and self._accelerator.num_processes > 1 and not is_reduced:
            raise RuntimeError(
                f"prepare: this {type(model).__name__} was prepared for evaluation only (Trainer.evaluate() "
                "or predict() before train(), or prepare_model(evaluation_mode=True)), so Accelerate no "
                "longer wraps it in DDP, and ranks would train different models: prepare it for training "
                "first; in a Trainer set eval_on_start=True"
            )

    def _check_one_model(self, objects: Sequence[Any]) -> None:
        known = [] if self._model is None else [self._model]
        models = known + [item for item in objects if isinstance(item, nn.Module) and item is not self._model]
        if len(models) < 2:
            return
        owners = {id(param): id(model) for model in models for param in model.parameters()}
        groups = [getattr(item, "param_groups", ()) for item in objects]
        stepped = [[param for group in each for param in group["params"]] for each in groups]
        remedy = (
            "since one optimizer steps both models, put them into one nn.Module, and prepare that module"
            if any(len({owners[id(param)] for param in each if id(param) in owners}) > 1 for each in stepped)
            else "call pyengine.adapters.accelerate.prepare once per model, with the model's own optimizers "
            "and loaders; each call returns another accelerator"
        )
        raise ValueError(
            f"prepare: got a second model ({type(models[1]).__name__}), but prepare accepts only one model: "
            f"{remedy}"
        )

    def _loader(self, prepared: Any) -> Any:
        """Register a loader, so that the last window ends when the loader ends.

        A loader with different numbers of batches on different ranks is rejected, because a plain loop over
        the batches of one rank cannot wait for the other ranks.
        """
        sampler = prepared.batch_sampler if prepared.batch_sampler is not None else prepared.sampler
        while isinstance(sampler, SkipBatchSampler):
            sampler = sampler.batch_sampler
        if isinstance(sampler, BatchSamplerShard) and not sampler.even_batches:
            raise ValueError(
                "prepare: got a loader with even_batches=False, so a rank's loop can end while other ranks "
                "still wait for it; leave even_batches=True, which pads the data, or prepare the loader with "
                "your own Accelerator and loop over `for window in accelerator.sync.windows(loader)`, where "
                "ranks without data continue until no rank has data"
            )
        self._loaders.append(prepared)
        return prepared

    def _optimizer(self, prepared: AcceleratedOptimizer) -> AcceleratedWindowOptimizer:
        if prepared not in self._optimizers:  # prepared by Accelerate, or for a closed engine
            prepared = AcceleratedWindowOptimizer(prepared.optimizer, self.sync)
            self._optimizers.append(prepared)
        ours: AcceleratedWindowOptimizer = prepared
        return ours

    def _scheduler(self, prepared: AcceleratedScheduler) -> AcceleratedScheduler:
        """Return a scheduler that steps at the end of each window of this model."""
        steps = prepared.scheduler.optimizer
        mine = [opt for opt in self._optimizers if opt is steps or opt.optimizer is steps]
        if not mine:
            raise ValueError(
                "prepare: got a scheduler without its optimizer: pass both to the same accelerator's prepare"
            )
        ours = AcceleratedScheduler(
            prepared.scheduler,
            mine,
            step_with_optimizer=prepared.step_with_optimizer,
            split_batches=prepared.split_batches,
        )
        ours.gradient_state = WindowBoundary(self.sync, self._accelerator.gradient_state)
        return ours


# ---- Accelerate's optimizer and scheduler, which step at the end of a model's window ----


class WindowBoundary:
    """A `GradientState` that marks the ends of one model's windows; other attributes are process-wide."""

    adjust_scheduler = False

    def __init__(self, sync: Sync, state: Any) -> None:
        self._sync, self._state = sync, state

    @property
    def sync_gradients(self) -> bool:
        return self._sync.is_sync_step

    @property
    def num_steps(self) -> int:
        return self._sync.gradient_accumulation_steps

    def _set_sync_gradients(self, value: bool) -> None:
        _refuse_sync_gradients(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class AcceleratedWindowOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate is untyped
    """An optimizer whose `step` runs the engine at the end of a window, and otherwise does nothing."""

    _is_accelerate_prepared = True  # a second prepare returns the optimizer unchanged
    steps_with_windows = True

    def __init__(self, optimizer: torch.optim.Optimizer, sync: Sync) -> None:
        super().__init__(optimizer, device_placement=False)
        self._sync: Sync | None = sync
        self._windows = WindowOptimizer(sync, optimizer, None)

    def step(self, closure: Any = None) -> None:
        if self._sync is not None:
            try:
                self._sync.refuse_bare_gradients()
            except RuntimeError as error:
                raise RuntimeError(
                    "call backward, accumulate and clip_grad_norm_ on the accelerator that prepare returned, "
                    f"not on the accelerator that was passed to prepare: {error}"
                ) from None
        self._windows.step(closure)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sync": None}  # a copy belongs to no engine

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients if the window has ended; do nothing in the middle of a window."""
        self._windows.zero_grad(set_to_none is not False)

    @property
    def step_was_skipped(self) -> bool:
        return self._windows.step_was_skipped


# ---- options of Accelerate that windows do not support ----


def check_accelerator(accelerator: Accelerator, settings: Settings) -> None:
    """Raise ValueError for unsupported options, before anything is prepared."""
    kind, steps = accelerator.distributed_type, accelerator.gradient_accumulation_steps
    if kind in _REDUCES_ITSELF:
        raise ValueError(
            f"accelerator: distributed_type is {kind.value}, which reduces its own gradients; expected DDP, "
            f"FSDP2 or a single process: {_REDUCES_ITSELF[kind]}"
        )
    config = accelerator.parallelism_config
    for name in () if config is None else ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(config, name) or 1) > 1:
            raise ValueError(
                f"accelerator: ParallelismConfig has {name}={size}, so several ranks share each batch, which "
                "must be counted once, but Accelerate's loop counts it on each rank; use your own loop with "
                "pe.GradSync(model, device_mesh=mesh, axes=pe.Axes(...)) (docs/mesh.md)"
            )
    if kind == DistributedType.FSDP and (problem := _plugin_problem(accelerator.state.fsdp_plugin, settings)):
        raise ValueError(f"accelerator: {problem}")
    if accelerator.scaler is not None and accelerator.mixed_precision != "fp16":
        raise ValueError(
            f"accelerator: mixed_precision={accelerator.mixed_precision!r} has its own rules for loss "
            "scaling; use 'fp16', whose scaler the engine can replace, or 'bf16', which needs none"
        )
    if steps not in (1, settings.accumulate):
        raise ValueError(
            f"accelerator has gradient_accumulation_steps={steps}, but accumulate={settings.accumulate}: the "
            "first applies to the process, the second to this model; leave out the accelerator's value"
        )
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ValueError(
            "accelerator: sync_each_batch=True, but gradients are reduced once per window; leave it out"
        )
    hook = (
        DDPCommunicationHookType.NO if accelerator.ddp_handler is None else accelerator.ddp_handler.comm_hook
    )
    if hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"accelerator: DistributedDataParallelKwargs has comm_hook={hook.name}, but the engine "
            "registers its own hook; pass `wire` instead"
        )


def _plugin_problem(plugin: Any, settings: Settings) -> str:
    """Return why `attach` would reject the options of the FSDP plugin; empty if `attach` accepts them."""
    where = "FullyShardedDataParallelPlugin"
    if plugin.fsdp_version != 2:
        return (
            f"{where} has fsdp_version={plugin.fsdp_version}, but FSDP1 reduces gradients itself in every "
            "backward; pass fsdp_version=2"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        return f"{where} has cpu_offload, but gradients must be on the model's device; leave it out"
    policy = plugin.mixed_precision_policy
    # Accelerate keeps shards in float32.
    dtype = None if policy is None else reduce_dtype_of(policy, torch.float32)
    if dtype is None or settings.problems() or settings.kind == "exact":  # exact sums bypass FSDP
        return ""
    if settings.kind == "fp32" and dtype.itemsize < torch.float32.itemsize:
        return (
            f"{where} sums gradients in {dtype} (mixed_precision sets one dtype for everything), but "
            f"accumulator='fp32' requires float32: pass mixed_precision_policy=MixedPrecisionPolicy("
            f"param_dtype={policy.param_dtype}, reduce_dtype=torch.float32) to the plugin, or "
            f"accumulator='native' and wire={dtype} to prepare"
        )
    if dtype != settings.wire.dtype and dtype.itemsize <= settings.wire.dtype.itemsize:
        return (
            f"{where} reduces in {dtype}, but wire={settings.wire}; expected a wire with the dtype of its "
            f"policy's reduce_dtype, or with a narrower dtype; pass wire={dtype}, or a "
            f"mixed_precision_policy with reduce_dtype={settings.wire.dtype}"
        )
    return ""
