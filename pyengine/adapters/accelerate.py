"""Accelerate's loop with pyengine's windows, under Accelerate's names.

`backward`, `accumulate`, `clip_grad_norm_` and `step` keep their names. Accelerate stores the end of a
window, the number of micro-batches and `sync_gradients` in one object for the process, divides every loss by
a fixed number, and averages over ranks without their counts. Here they belong to one model's engine: the
loader passed to `prepare` decides where a window ends, and the divisor is the number of counted items.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pyengine.adapters.backward import backward
from pyengine.adapters.engine_for import engine_for
from pyengine.engine.sync import Sync
from pyengine.gradients.fsdp.deferral import Defer, Deferral
from pyengine.gradients.settings import Accumulator, NonFinite, Settings, as_accumulator
from pyengine.step.grad_scaler import GradScaler
from pyengine.window.header import Count
from pyengine.wire import FP32
from pyengine.wire.named import WireLike, as_wire

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import GradientState
except ImportError as error:
    raise ImportError(
        "pyengine.adapters.accelerate needs accelerate, which is not installed: pip install '.[adapters]' "
        "in a clone of pyengine"
    ) from error

from pyengine.adapters.accelerate_refusals import REFUSED, check_accelerator, check_loader
from pyengine.adapters.accelerate_steps import AcceleratedWindowOptimizer, WindowBoundary


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

    The model gets its own engine and windows.

    Args:
        accelerator: of one process, of DDP, or of FSDP2 (`FullyShardedDataParallelPlugin(fsdp_version=2)`),
            in fp32, bf16 or fp16; or the `WindowAccelerator` of an earlier `prepare`. Its
            `gradient_accumulation_steps` is 1 or `accumulate`.
        objects: one model, its optimizers and schedulers, and the loaders whose end ends the last window, in
            any order; prepared before or not. Call `prepare` again for another model, which gets another
            accelerator.
        accumulate, wire, accumulator, nonfinite: as for `pe.GradSync`.
        defer, defer_budget_mb: of a model under FSDP2, as for `pe.attach`.

    Returns:
        A `WindowAccelerator` to use in place of `accelerator` for this model, then the prepared objects in
        their order.

    Raises:
        ValueError: an option that this loop does not support, or objects that do not belong together.
        TypeError: the first argument is no accelerator; or the prepared model is compiled around DDP.

    Cost: as `pe.attach` on several processes, as `pe.GradSync` on one.

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
    if isinstance(accelerator, WindowAccelerator):  # of another model, or after free_memory
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


_OWN = frozenset({"sync", "_accelerator", "_settings", "_deferral", "_model", "_loaders", "_optimizers"})


class WindowAccelerator:
    """An accelerator for one model; other attributes are those of the wrapped accelerator.

    Args:
        accelerator: the wrapped accelerator.
        settings, deferral: of the engine.

    Attributes:
        sync: the model's engine, after `prepare` of the model: `on_step`, `state_dict`, `flush`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        settings: Settings,
        deferral: Deferral = Deferral(),  # noqa: B008 - frozen
    ) -> None:
        check_accelerator(accelerator, settings)
        self._accelerator, self._settings, self._deferral = accelerator, settings, deferral
        self._model: nn.Module | None = None
        self._loaders: list[DataLoaderStateMixin] = []
        self._optimizers: list[AcceleratedWindowOptimizer] = []

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a full window; set it between windows, to the same value on every rank."""
        return self._settings.accumulate if self._model is None else self.sync.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if self._model is None:  # the engine will use it
            self._settings = replace(self._settings, accumulate=steps)
        else:
            self.sync.gradient_accumulation_steps = steps

    @property
    def wrapped(self) -> Accelerator:
        """The accelerator that `prepare` was given."""
        return self._accelerator

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        return self.sync.is_sync_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of this model's engine in fp16.

        The accelerator's own scaler is for models outside windows.
        """
        return self.sync.scaler

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does; optimizers and schedulers follow the windows."""
        self._check_one_model(objects)
        evaluated = [item for item in objects if getattr(item, "_is_accelerate_prepared", False)]
        prepared = self._accelerator.prepare(*objects, device_placement=device_placement)
        prepared = (prepared,) if len(objects) == 1 else tuple(prepared)  # FSDP2 brings a list
        for item in prepared:
            if isinstance(item, nn.Module):
                self._check_model(item, is_old=any(item is other for other in evaluated))
                self._own(item)
        prepared = tuple(
            self._loader(item) if isinstance(item, DataLoaderStateMixin) else item for item in prepared
        )
        prepared = tuple(
            self._optimizer(item) if isinstance(item, AcceleratedOptimizer) else item for item in prepared
        )
        prepared = tuple(
            self._scheduler(item) if isinstance(item, AcceleratedScheduler) else item for item in prepared
        )
        return prepared if len(prepared) > 1 else prepared[0]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader of the remaining batches, whose end ends the last window as well."""
        return self._loader(self._accelerator.skip_first_batches(dataloader, num_batches))

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Wrap one micro-batch: the last one if the window is full or the loader has ended."""
        if any(model is not self._model for model in models):
            raise ValueError(
                "accumulate: got a model that this accelerator was not prepared with; every model has its "
                "own: `with accelerator_a.accumulate(a), accelerator_b.accumulate(b):`"
            )
        if not self._loaders:
            raise RuntimeError(
                "accumulate: no loader was prepared, so the end of a short last window is unknown: pass the "
                "loader to prepare, or set it yourself: `with accelerator.sync.accumulate(last=...)`"
            )
        return self.sync.accumulate(last=_has_ended(self._accelerator.gradient_state, self._loaders))

    def backward(self, loss: Tensor, *, count: Count | None = None, **options: Any) -> None:
        """Run the backward of one micro-batch: of a mean loss, or of a sum over `count` items.

        `options` are torch's. Within `with accelerator.sync.micro_batch(count=n):` it may be called several
        times.
        """
        backward(self.sync, loss, count=count, options=options)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip at the window's end.

        As `pe.Sync.clip_grad_norm_` where `parameters` are all trained parameters of the model.
        """
        self._check_end("clip_grad_norm_")
        clipped: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if norm_type in (2, math.inf) and self._is_whole(clipped):
            return self.sync.clip_grad_norm_(max_norm, norm_type)
        self.sync.flush()
        return nn.utils.clip_grad_norm_(clipped, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clip every element of the mean gradient."""
        self._check_end("clip_grad_value_")
        clipped: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._is_whole(clipped):
            self.sync.clip_grad_value_(clip_value)
        else:
            self.sync.flush()
            nn.utils.clip_grad_value_(clipped, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Wait until `.grad` holds the mean gradient, to be read or changed before the step."""
        del optimizer  # one engine has one divisor
        self._check_end("unscale_gradients")
        self.sync.flush()

    def end_training(self) -> None:
        """End trackers; on an accelerator the last step's record is emitted now."""
        if self._model is not None:
            self.sync.synchronize()
        self._accelerator.end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine and free memory as Accelerate does.

        Another model, or this one, may be prepared next.
        """
        if self._model is not None:
            sync, self._model, self._loaders, self._optimizers = self.sync, None, [], []
            self._settings = replace(self._settings, accumulate=sync.gradient_accumulation_steps)
            if sync.scaler is not None:  # the next engine starts from this state
                self._accelerator.scaler.load_state_dict(sync.scaler.state_dict())
                self._accelerator._custom_objects.remove(sync.scaler)  # noqa: SLF001 - register_for_checkpointing has no opposite
            sync.close()
            del self.sync
        return self._accelerator.free_memory(*objects)

    def clear(self, *objects: Any) -> Any:
        """Do as `free_memory`, as Accelerate's `clear` does."""
        return self.free_memory(*objects)

    def __getattr__(self, name: str) -> Any:
        if name == "sync":
            raise RuntimeError("no model has been prepared: pass the model to prepare, too")
        if name in REFUSED:
            raise AttributeError(f"{name}: {REFUSED[name]}")
        return getattr(self._accelerator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sync_gradients":
            raise AttributeError(
                f"sync_gradients={value}: a window ends when it is full, or with the loader; to end one "
                "earlier, make its last micro-batch `with accelerator.sync.accumulate(last=True)`"
            )
        if name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._accelerator, name, value)

    def _check_end(self, call: str) -> None:
        """Raise outside of a window's end, where gradients are not complete."""
        if not self.sync_gradients:
            raise RuntimeError(
                f"{call}: put it under `if accelerator.sync_gradients:`; this micro-batch is not its "
                "window's last, and the gradients are incomplete sums of this rank alone"
            )

    def _is_whole(self, params: Sequence[Tensor]) -> bool:
        """Whether these are all trained parameters of the model."""
        assert self._model is not None
        trained = {id(param) for param in self._model.parameters() if param.requires_grad}
        return {*map(id, params)} >= trained

    def _check_model(self, model: nn.Module, *, is_old: bool) -> None:
        """Refuse a model that Accelerate has prepared for evaluation.

        Accelerate returns it unwrapped from every later `prepare`.
        """
        is_reduced = isinstance(model, DistributedDataParallel | FSDPModule)
        if is_old and self._accelerator.num_processes > 1 and not is_reduced:
            raise RuntimeError(
                f"prepare: this {type(model).__name__} was prepared for evaluation only (Trainer.evaluate() "
                "or predict() before train(), or prepare_model(evaluation_mode=True)), so Accelerate no "
                "longer wraps it in DDP, and ranks would train different models: prepare it for training "
                "first; in a Trainer set eval_on_start=True"
            )

    def _check_one_model(self, objects: Sequence[Any]) -> None:
        """Refuse a second model before anything is prepared."""
        known = [] if self._model is None else [self._model]
        models = known + [item for item in objects if isinstance(item, nn.Module) and item is not self._model]
        if len(models) < 2:
            return
        owners = {id(param): id(model) for model in models for param in model.parameters()}
        remedy = (
            "since one optimizer steps both, make one nn.Module that holds them, and prepare that"
            if any(len(_owners(item, owners)) > 1 for item in objects)
            else "call pyengine.adapters.accelerate.prepare once a model, with its own optimizers and "
            "loaders; each call returns another accelerator"
        )
        raise ValueError(
            f"prepare: got a second model ({type(models[1]).__name__}), and windows belong to one: {remedy}"
        )

    def _own(self, model: nn.Module) -> None:
        if self._model is None:
            self.sync: Sync = engine_for(model, self._settings, self._accelerator.scaler, self._deferral)
            self._model = model
            if self.sync.scaler is not None:
                self._accelerator.register_for_checkpointing(self.sync.scaler)

    def _loader(self, prepared: Any) -> Any:
        """Register a loader whose end ends the last window."""
        check_loader(prepared)
        self._loaders.append(prepared)
        return prepared

    def _optimizer(self, prepared: AcceleratedOptimizer) -> AcceleratedWindowOptimizer:
        if prepared not in self._optimizers:  # Accelerate's own, or of a closed engine
            prepared = AcceleratedWindowOptimizer(prepared.optimizer, self.sync)
            self._optimizers.append(prepared)
        ours: AcceleratedWindowOptimizer = prepared
        return ours

    def _scheduler(self, prepared: AcceleratedScheduler) -> AcceleratedScheduler:
        """Return a scheduler that steps at the ends of this model's windows."""
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
        ours.gradient_state = WindowBoundary(self.sync)
        return ours


def _owners(optimizer: Any, owners: Mapping[int, int]) -> set[int]:
    """Return the models whose parameters an optimizer has; empty for other objects."""
    groups = getattr(optimizer, "param_groups", ())
    ids = {id(param) for group in groups for param in group["params"]}
    return {owners[key] for key in ids & owners.keys()}


def _has_ended(state: GradientState, loaders: Sequence[DataLoaderStateMixin]) -> bool:
    """Whether one of the loaders is being iterated and has returned its last batch."""
    if not state.sync_with_dataloader:
        return False
    running = {id(loader) for loader in state.dataloader_references}
    return any(id(loader) in running and loader.end_of_dataloader for loader in loaders)
