"""Accelerate's loop with pyengine's windows: `backward`, `accumulate`, `clip_grad_norm_`, `step` keep their
names.

Accelerate keeps boundary, number of micro-batches and "sync now" in one object a process, divides every loss
by a fixed number, and averages over ranks whatever they counted. Here they belong to one model's engine: the
boundary comes from the loader given to `prepare`, the divisor from what was counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyengine.adapters.accelerate_refusals import REFUSED, UNEVEN
from pyengine.adapters.engine_for import engine_for
from pyengine.engine.sync import Sync
from pyengine.gradients.settings import Settings
from pyengine.step.grad_scaler import GradScaler
from pyengine.step.window_optimizer import WindowOptimizer
from pyengine.window.counter import check_accumulate
from pyengine.window.header import Count
from pyengine.wire import FP32, Wire

try:
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, DataLoaderStateMixin, SkipBatchSampler
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import GradientState
    from accelerate.utils import DDPCommunicationHookType, DistributedType
except ImportError as error:
    raise ImportError(
        "pyengine.adapters.accelerate needs accelerate, which is not installed: pip install '.[adapters]' "
        "in a clone of pyengine"
    ) from error

_SHARDED = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    accumulate: int,
    wire: Wire = FP32(),  # noqa: B008 - frozen
    accumulator: str = "fp32",
    nonfinite: str = "skip",
) -> tuple[Any, ...]:
    """Prepare a model with its optimizers, loaders and schedulers, as `accelerator.prepare` does, for windows
    of its own.

    Args:
        accelerator: of one process or of DDP, in fp32, bf16 or fp16. Its `gradient_accumulation_steps` is 1
            or `accumulate`.
        objects: one model, its optimizers and schedulers, and the loaders whose end ends the last window, in
            any order; prepared before or not. Another model gets a `prepare`, and so an accelerator, of its
            own.
        accumulate, wire, accumulator, nonfinite: as for `pe.GradSync`.

    Returns:
        A `WindowAccelerator` to use in place of `accelerator` for this model, then the prepared objects in
        their order.

    Raises:
        ValueError: an option that this loop cannot honour, or objects that do not belong together.
        TypeError: the prepared model is sharded or compiled around DDP.

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
    windows = WindowAccelerator(accelerator, Settings(accumulate, wire, accumulator, nonfinite))
    prepared = windows.prepare(*objects)
    return (windows, *prepared) if isinstance(prepared, tuple) else (windows, prepared)


_OWN = frozenset({"sync", "_accelerator", "_settings", "_model", "_loaders", "_optimizers"})


class WindowAccelerator:
    """An accelerator for one model; everything not named here is the wrapped accelerator's own.

    Args:
        accelerator: the accelerator to ask for everything else.
        settings: of the engine.

    Attributes:
        sync: the model's engine, once `prepare` was given the model: `on_step`, `state_dict`, `flush`.
    """

    def __init__(self, accelerator: Accelerator, settings: Settings) -> None:
        _check(accelerator, settings)
        self._accelerator, self._settings = accelerator, settings
        self._model: nn.Module | None = None
        self._loaders: list[DataLoaderStateMixin] = []
        self._optimizers: list[_Optimizer] = []

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a full window; set it between two windows, on every rank alike."""
        return self._settings.accumulate

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        wrong = check_accumulate(steps)
        if wrong:
            raise ValueError("gradient_accumulation_steps" + wrong[0].removeprefix("accumulate"))
        if self._model is not None:
            self.sync._engine.resize(steps)
        self._settings = replace(self._settings, accumulate=steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        return self.sync.is_sync_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step that was due left the parameters alone."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of this model's engine in fp16; the accelerator's own is for models outside
        windows.
        """
        return self.sync.scaler

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does; optimizers and schedulers then follow this model's windows."""
        evaluated = [item for item in objects if getattr(item, "_is_accelerate_prepared", False)]
        prepared = self._accelerator.prepare(*objects, device_placement=device_placement)
        prepared = prepared if isinstance(prepared, tuple) else (prepared,)
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
        """Return a loader of the rest, whose end ends the last window as well."""
        return self._loader(self._accelerator.skip_first_batches(dataloader, num_batches))

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Wrap one micro-batch: the window's last one if it is full or the loader has come to its end."""
        if any(model is not self._model for model in models):
            raise ValueError(
                "accumulate: got a model that this accelerator was not prepared with; every model has its "
                "own: `with accelerator_a.accumulate(a), accelerator_b.accumulate(b):`"
            )
        if not self._loaders:
            raise RuntimeError(
                "accumulate: no loader was prepared, so nothing tells where a short last window ends: give "
                "the loader to prepare, or say it yourself: `with accelerator.sync.accumulate(last=...)`"
            )
        return self.sync.accumulate(last=_has_ended(self._accelerator.gradient_state, self._loaders))

    def backward(self, loss: Tensor, *, count: Count | None = None, **options: Any) -> None:
        """Run the backward of one micro-batch: of a mean loss, or of a sum over `count` items;
        see `pe.Sync.backward`.
        """
        if options:
            raise ValueError(
                f"backward: got {', '.join(options)}, need the loss and its count only: the engine runs the "
                "backward, and takes no options of torch's; leave them out (several losses of one graph: "
                "add them up)"
            )
        self.sync.backward(loss, count=count)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip at the window's end; the 2-norm over the whole model needs no pass of its own."""
        self._check_end("clip_grad_norm_")
        clipped: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if norm_type == 2 and {*map(id, clipped)} >= {*map(id, self._trained())}:
            return self.sync.clip_grad_norm_(max_norm)
        self.sync.unscale_()
        return nn.utils.clip_grad_norm_(clipped, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clip every element of the mean gradient, written into `.grad` for it."""
        self._check_end("clip_grad_value_")
        self.sync.unscale_()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Write the mean gradient into `.grad`, to be read or changed before the step."""
        del optimizer  # one engine has one divisor
        self._check_end("unscale_gradients")
        self.sync.unscale_()

    def end_training(self) -> None:
        """End trackers and the like; on an accelerator the last step's record comes now."""
        self.sync.synchronize()
        self._accelerator.end_training()

    def __getattr__(self, name: str) -> Any:
        if name == "sync":
            raise RuntimeError("no model has been prepared: give prepare the model, too")
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
        """Refuse what only the gradients of a whole window can be used for."""
        if not self.sync_gradients:
            raise RuntimeError(
                f"{call}: put it under `if accelerator.sync_gradients:`; this micro-batch is not its "
                "window's last, and the gradients are unfinished sums of this rank alone"
            )

    def _trained(self) -> list[nn.Parameter]:
        assert self._model is not None
        return [param for param in self._model.parameters() if param.requires_grad]

    def _check_model(self, model: nn.Module, *, is_old: bool) -> None:
        """Refuse a model that Accelerate has once prepared for evaluation,
        and gives back as it is ever after.
        """
        alone = self._accelerator.num_processes == 1 or isinstance(model, DistributedDataParallel)
        if is_old and not alone:
            raise RuntimeError(
                f"prepare: this {type(model).__name__} was prepared for evaluation only (Trainer.evaluate() "
                "or predict() before train(), or prepare_model(evaluation_mode=True)), so Accelerate does "
                "not wrap it in DDP any more, and ranks would train apart: prepare it for training first; "
                "in a Trainer set eval_on_start=True"
            )

    def _own(self, model: nn.Module) -> None:
        if self._model is not None and self._model is not model:
            raise ValueError(
                f"prepare: got a second model ({type(model).__name__}), and windows belong to one: call "
                "prepare once a model; each gives an accelerator of its own"
            )
        if self._model is None:
            self.sync: Sync = engine_for(model, self._settings, self._accelerator.scaler)
            self._model = model
            if self.sync.scaler is not None:
                self._accelerator.register_for_checkpointing(self.sync.scaler)

    def _loader(self, prepared: Any) -> Any:
        """Keep a loader whose end ends the last window."""
        _check_loader(prepared)
        self._loaders.append(prepared)
        return prepared

    def _optimizer(self, prepared: AcceleratedOptimizer) -> _Optimizer:
        ours = prepared if isinstance(prepared, _Optimizer) else _Optimizer(prepared.optimizer, self.sync)
        if ours not in self._optimizers:
            self._optimizers.append(ours)
        return ours

    def _scheduler(self, prepared: AcceleratedScheduler) -> AcceleratedScheduler:
        """Return a scheduler that steps where this model's windows end."""
        steps = prepared.scheduler.optimizer
        mine = [opt for opt in self._optimizers if opt is steps or opt.optimizer is steps]
        if not mine:
            raise ValueError(
                "prepare: got a scheduler without its optimizer: give both to the same accelerator's prepare"
            )
        ours = AcceleratedScheduler(
            prepared.scheduler,
            mine,
            step_with_optimizer=prepared.step_with_optimizer,
            split_batches=prepared.split_batches,
        )
        ours.gradient_state = _Boundary(self.sync)
        return ours


class _Boundary:
    """Tells an AcceleratedScheduler where one model's windows end;
    Accelerate asks its process-wide GradientState.
    """

    adjust_scheduler = False

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        return self._sync.is_sync_step


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate is untyped
    """Steps through the engine where a window ends and does nothing elsewhere."""

    _is_accelerate_prepared = True  # not to be wrapped when it is prepared again
    steps_with_windows = True

    def __init__(self, optimizer: torch.optim.Optimizer, sync: Sync) -> None:
        super().__init__(optimizer, device_placement=False)
        self._windows = WindowOptimizer(sync, optimizer, None)

    def step(self, closure: Any = None) -> None:
        self._windows.step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine starts every window from zero."""

    @property
    def step_was_skipped(self) -> bool:
        return self._windows.step_was_skipped


def _has_ended(state: GradientState, loaders: Sequence[DataLoaderStateMixin]) -> bool:
    """Whether one of the loaders, if it is being iterated, has handed out its last batch."""
    if not state.sync_with_dataloader:
        return False
    running = {id(loader) for loader in state.dataloader_references}
    return any(id(loader) in running and loader.end_of_dataloader for loader in loaders)


def _check_loader(loader: Any) -> None:
    """Refuse a loader that ends at different places: a flat loop over one rank's batches cannot wait for the
    others.
    """
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while isinstance(sampler, SkipBatchSampler):
        sampler = sampler.batch_sampler
    if isinstance(sampler, BatchSamplerShard) and not sampler.even_batches:
        raise ValueError(UNEVEN)


def _check(accelerator: Accelerator, settings: Settings) -> None:
    """Refuse what this loop cannot honour."""
    kind, steps = accelerator.distributed_type, accelerator.gradient_accumulation_steps
    if kind in _SHARDED:
        raise ValueError(
            f"accelerator: distributed_type is {kind.value}, which reduces its own gradients; need DDP or "
            "one process"
        )
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
