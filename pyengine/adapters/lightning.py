"""Lightning's Trainer with windows of pyengine: a DDP strategy, and a callback for the records of steps.

Lightning divides every loss by `accumulate_grad_batches`, also in a short last window, and lets DDP average
over ranks whatever they counted. Here the loss that `training_step` returned goes to the engine as it is;
Lightning still says which micro-batch is a window's last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pyengine.adapters.engine_for import engine_for
from pyengine.engine.sync import Sync
from pyengine.gradients.settings import Settings
from pyengine.step.step_record import StepRecord
from pyengine.telemetry.base import numbers
from pyengine.wire import FP32, Wire

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        "pyengine.adapters.lightning needs lightning, which is not installed: pip install '.[adapters]' in "
        "a clone of pyengine"
    ) from error


class WindowStrategy(DDPStrategy):
    """DDP whose gradients travel once a window, over a wire of yours, on any device; made as a DDPStrategy
    is.

    `training_step` returns a mean loss, or `{"loss": summed, "count": items}`. Gradients have their final
    values in `on_before_optimizer_step` and for Lightning's clipping. A window that is not finite on some
    rank is stepped on none. In "16-mixed" the loss scale is the engine's, and saved in Lightning's
    checkpoints as ever.

    Attributes:
        wire, accumulator, nonfinite: as for `pe.GradSync`; set them in a subclass or before the Trainer is
            made.
        sync: the engine, from `on_fit_start` on: `on_step`.

    Example:
        >>> trainer = Trainer(strategy=WindowStrategy(), accumulate_grad_batches=8)  # doctest: +SKIP
    """

    wire: Wire = FP32()
    accumulator = "fp32"
    nonfinite = "skip"
    sync: Sync

    def configure_ddp(self) -> None:
        """Wrap the model, and attach an engine to it."""
        _check(self._module)
        super().configure_ddp()
        assert self.model is not None
        settings = Settings(_most(self._module.trainer), self.wire, self.accumulator, self.nonfinite)
        precision = self.precision_plugin
        if isinstance(precision, MixedPrecision):
            self.sync = engine_for(self.model, settings, precision.scaler)
            precision.scaler = self.sync.scaler  # which it puts into checkpoints
        else:
            self.sync = engine_for(self.model, settings, None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step, and keep its loss from being divided."""
        output = super().training_step(*args, **kwargs)
        self._output: Mapping[str, Any] = output if isinstance(output, Mapping) else {"loss": output}
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward of the loss as `training_step` returned it."""
        if args or kwargs:
            raise ValueError(
                f"backward: got {[*args, *kwargs]}, need the loss only; a window takes no options"
            )
        output, self._output = self._output, {}
        self.precision_plugin.pre_backward(output["loss"], self._module)  # for its hooks
        self.sync.backward(output["loss"], count=output.get("count", 1))
        return self.precision_plugin.post_backward(closure_loss, self._module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Make the body a micro-batch that is not its window's last."""
        with self.sync.accumulate():
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the window's last micro-batch, the hooks that look at gradients, and the step."""
        if kwargs:
            raise ValueError(
                f"optimizer_step: got {', '.join(kwargs)}, need the closure only: the engine steps, and "
                "hands nothing on to optimizer.step"
            )
        with self.sync.accumulate(last=True):
            result = closure()
        self.sync.unscale_()
        self.precision_plugin._after_closure(self._module, optimizer)
        self.sync.step(optimizer)
        return result

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None  # from `Trainer.fit` on
        return self.lightning_module

    def _register_ddp_hooks(self) -> None:
        options = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
        given = [name for name in options if getattr(self, f"_{name}") is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)}: got one, and the engine registers a hook of its own; say how buckets "
                "travel by `wire`"
            )


class LogSteps(Callback):
    """Hand the numbers of every `StepRecord` to the Trainer's loggers, as `pyengine/<name>`.

    Example:
        >>> trainer = Trainer(strategy=WindowStrategy(), callbacks=[LogSteps()])  # doctest: +SKIP
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the engine."""
        if not isinstance(trainer.strategy, WindowStrategy):
            raise TypeError(
                f"LogSteps: strategy is a {type(trainer.strategy).__name__}, need a WindowStrategy, which "
                "has steps to log"
            )
        trainer.strategy.sync.on_step(partial(_log, trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """On an accelerator, hear of the last step."""
        assert isinstance(trainer.strategy, WindowStrategy)
        trainer.strategy.sync.synchronize()


def _log(trainer: Trainer, record: StepRecord) -> None:
    metrics = {f"pyengine/{name}": value for name, value in numbers(record).items()}
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=record.step)


def _most(trainer: Trainer) -> int:
    """Return the micro-batches of the largest window that the Trainer will ask for."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set elsewhere
    schedules = [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]
    planned = [num for schedule in schedules for num in schedule.scheduling.values()]
    return max([trainer.accumulate_grad_batches, *planned])


def _check(module: LightningModule) -> None:
    """Refuse what takes the backward out of the engine's hands."""
    if not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False: windows and divisors are your own code's there, so there is "
            "nothing to translate; use pe.attach or pe.GradSync, or automatic optimization"
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__} overrides backward, which the engine runs itself; remove it"
        )
