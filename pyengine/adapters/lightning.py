"""Lightning strategies for DDP and FSDP2 that train in pyengine windows.

Lightning divides every loss by `accumulate_grad_batches`, even in a short last window, and DDP and FSDP
average over ranks without weighting by item counts. With these strategies, the engine receives the undivided
loss that `training_step` returns. Lightning still determines which micro-batch ends a window; under manual
optimization, the module determines it. The callback `LogSteps` logs the record of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pyengine.adapters.engine_for import (
    EngineSettings,
    abandon_open_window,
    allow_windows_of,
    backward,
    engine_for,
)
from pyengine.engine.sync import Sync
from pyengine.gradients.fsdp.deferral import Defer, Deferral
from pyengine.gradients.fsdp.private import is_unit
from pyengine.step.grad_scaler import copy_of
from pyengine.step.step_record import StepRecord
from pyengine.telemetry import numbers

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.strategies.parallel import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        "pyengine.adapters.lightning needs lightning, which is not installed: pip install '.[adapters]' in "
        "a clone of pyengine"
    ) from error

if TYPE_CHECKING:
    _Mixed = ParallelStrategy  # the class that the mixin extends
else:
    _Mixed = object

Accumulate = int | Mapping[str, int]


class Windows(EngineSettings, _Mixed):
    """Mixin for a strategy that runs Lightning's micro-batches in windows of one or more engines.

    Attributes:
        wire, accumulator, nonfinite: see `pe.GradSync`; set them in a subclass or before the Trainer is
            created.
        accumulate: under manual optimization, the number of micro-batches in the longest window. A dict from
            submodule name to such a number gives each submodule separate windows and a separate engine.
        syncs: the engines by submodule name; an engine for the whole module has the name "".
    """

    accumulate: Accumulate = 1
    syncs: Mapping[str, Sync] = {}
    _output: Mapping[str, Any] = {}

    @property
    def sync(self) -> Sync:
        """The engine, available from `on_fit_start` to the end of the fit.

        Raises:
            RuntimeError: there is no engine, or there are several engines (see `syncs`).
        """
        if len(self.syncs) != 1:
            names = ", ".join(map(repr, self.syncs))
            raise RuntimeError(
                f"sync: there are engines for {names}; use syncs[name]"
                if names
                else "sync: there is no engine before Trainer.fit has set up the strategy"
            )
        return next(iter(self.syncs.values()))

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        self._close()
        self._check(self._module)
        super().setup(trainer)
        if self._module.automatic_optimization:
            # The engine needs the number of micro-batches in the largest window that the Trainer will run.
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set elsewhere
            schedules = [each for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
            planned = [num for schedule in schedules for num in schedule.scheduling.values()]
            self.syncs = {"": self._engine("", max([trainer.accumulate_grad_batches, *planned]))}
        else:
            sizes = self.accumulate if isinstance(self.accumulate, Mapping) else {"": self.accumulate}
            self.syncs = {name: self._engine(name, size) for name, size in sizes.items()}
            self._sync_of = {
                id(optimizer): self.syncs[self._owner(index, optimizer)]
                for index, optimizer in enumerate(self.optimizers)
            }
        self._replace_scaler()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if not self._module.automatic_optimization or self._skips_backward:
            return
        sync, planned = self.sync, self._module.trainer.accumulate_grad_batches
        # The module's `on_train_batch_start` may have ended the previous epoch in the middle of a window;
        # Lightning starts a new epoch from zero gradients.
        if batch_idx == 0:
            abandon_open_window(sync)
        allow_windows_of(sync, planned)  # a callback may have changed `accumulate_grad_batches`

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self._module.automatic_optimization:  # use the loss before Lightning divides it
            self._output = output if isinstance(output, Mapping) else {"loss": output}
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward of the loss that `training_step` returned; `closure_loss` is already divided.

        Under manual optimization, run the backward of `closure_loss`, which is either a whole micro-batch or
        one of several backwards in a `micro_batch` block.
        """
        if args:
            raise ValueError(
                f"backward: got {len(args)} positional options; pass them by name: manual_backward(loss, "
                "retain_graph=True)"
            )
        module, precision = self._module, self.precision_plugin
        if module.automatic_optimization:
            if kwargs:
                raise ValueError(
                    f"backward: got {[*kwargs]}, expected only the loss: use manual optimization "
                    "(automatic_optimization=False) for other options"
                )
            output, self._output = self._output, {}
            loss, sync = output["loss"], self.sync
            run = partial(sync.backward, loss, count=output.get("count", 1))
        else:
            count, sync = kwargs.pop("count", None), kwargs.pop("sync", None)
            if sync is None and len(self.syncs) > 1:
                raise ValueError(
                    f"manual_backward: the strategy has engines for {', '.join(map(repr, self.syncs))}, and "
                    "the loss belongs to one of them: pass that engine, self.manual_backward(loss, "
                    "sync=strategy.syncs[name])"
                )
            loss = closure_loss
            sync = self.sync if sync is None else sync
            run = partial(backward, sync, loss, count=count, options=kwargs)
        precision.pre_backward(loss, module)  # runs Lightning's hooks without its loss scaling
        run()
        precision.post_backward(loss, module)
        return closure_loss.detach()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Run micro-batches that do not end a window."""
        with ExitStack() as stack:
            if self._skips_backward:
                pass
            elif self._module.automatic_optimization:
                stack.enter_context(self.sync.accumulate())
            else:  # `optimizer.toggle_model(sync_grad=False)`
                for sync in self.syncs.values():
                    stack.enter_context(sync.no_sync())
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if kwargs:
            raise ValueError(
                f"optimizer_step: got {', '.join(kwargs)}, expected only the closure: the engine calls "
                "optimizer.step, and passes no arguments to it"
            )
        if self._skips_backward:
            return closure()
        if self._module.automatic_optimization:
            sync = self.sync
            with sync.accumulate(last=True):  # the closure contains the window's last micro-batch
                result = closure()
        else:
            result, sync = closure(), self._sync_of[id(optimizer)]
            try:
                sync.refuse_bare_gradients()
            except RuntimeError as error:
                raise RuntimeError(
                    f"call self.manual_backward(loss) in place of loss.backward(): {error}"
                ) from None
        self.precision_plugin._after_closure(self._module, optimizer)  # noqa: SLF001 - hooks before a step
        sync.step(optimizer)
        return result

    @property
    def _skips_backward(self) -> bool:
        """Whether batches run only the forward, as in StochasticWeightAveraging's final BatchNorm update."""
        return bool(getattr(self._module.trainer.fit_loop, "_skip_backward", False))

    def _owner(self, index: int, optimizer: Optimizer) -> str:
        named = {
            id(param): name for name in self.syncs for param in self._module.get_submodule(name).parameters()
        }
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owners = sorted({str(named.get(id(param))) for param in params if param.requires_grad})
        if len(owners) != 1 or owners[0] not in self.syncs:
            raise ValueError(
                f"optimizer {index} ({type(optimizer).__name__}) holds parameters from {owners} ('None' "
                "means that no engine owns the parameter), but all its parameters must come from one of "
                f"{list(self.syncs)}: each of these submodules has its own windows. Change which submodules "
                "the strategy's `accumulate` names, or pass a single number to use one engine for the whole "
                "module"
            )
        return owners[0]

    def teardown(self) -> None:
        self._close()
        super().teardown()

    def _check(self, module: LightningModule) -> None:
        """Raise an error for unsupported options, before anything is set up."""
        accumulate = self.accumulate
        if is_overridden("backward", module):
            raise ValueError(
                f"{type(module).__name__} overrides backward, which the engine runs itself; remove it (under "
                "manual optimization call sync.micro_batch, or manual_backward with torch's options)"
            )
        if module.automatic_optimization and accumulate != 1:
            raise ValueError(
                f"accumulate={accumulate!r} on the strategy is for manual optimization; with Lightning's own "
                "loop, use Trainer(accumulate_grad_batches=...)"
            )
        if isinstance(accumulate, Mapping):
            known = {name for name, _ in module.named_modules()}
            unknown = [name for name in accumulate if name not in known or not name]
            if unknown or not accumulate:
                raise ValueError(
                    f"accumulate={dict(accumulate)!r}: expected a dict from names of submodules of "
                    f"{type(module).__name__} to micro-batches per window"
                    + (f"; there is no {unknown[0]!r}" if unknown else "")
                )

    def _engine(self, name: str, accumulate: int) -> Sync:
        """Create the engine for the module, or for the submodule with this name."""
        raise NotImplementedError

    def _replace_scaler(self) -> None:
        """Replace Lightning's loss scaler with the engine's scaler, which Lightning saves in checkpoints."""
        precision = self.precision_plugin
        if not isinstance(precision, MixedPrecision) or precision.scaler is None:
            return
        if len(self.syncs) > 1:
            raise ValueError(
                f"precision='16-mixed' with engines for {', '.join(map(repr, self.syncs))}: Lightning has "
                "one loss scale, but each engine needs its own; use 'bf16-mixed', or one engine"
            )
        precision.scaler = self.sync.scaler = copy_of(precision.scaler)

    def _close(self) -> None:
        for sync in self.syncs.values():
            sync.close()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None  # `Trainer.fit` has set it
        return self.lightning_module


class WindowStrategy(Windows, DDPStrategy):
    """DDP strategy that reduces gradients once per window, over any wire and on any device.

    Accepts the arguments of `DDPStrategy` and has the settings of `Windows`. `training_step` returns a mean
    loss, or `{"loss": summed, "count": items}`. Gradients have their final values in
    `on_before_optimizer_step` and when Lightning clips them. If the gradients of a window have inf or nan on
    some rank, no rank steps. With `precision="16-mixed"` the engine scales the loss, and Lightning's
    checkpoints save the scale as usual. Manual optimization uses `pe.GradSync` instead of DDP.

    Example:
        >>> trainer = Trainer(strategy=WindowStrategy(), accumulate_grad_batches=8)  # doctest: +SKIP
    """

    def configure_ddp(self) -> None:
        """Wrap the model in DDP, except under manual optimization.

        Under manual optimization backwards run inside the forward, where DDP cannot reduce gradients.
        """
        if self._module.automatic_optimization:
            super().configure_ddp()

    def _check(self, module: LightningModule) -> None:
        super()._check(module)
        options = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
        given = [name for name in options if getattr(self, f"_{name}") is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)}: not supported, as the engine registers its own hook; set `wire` instead"
            )
        unused = sorted({*self._ddp_kwargs} - {"find_unused_parameters"})
        if unused and not module.automatic_optimization:
            raise ValueError(
                f"{', '.join(unused)}: an option of DDP, but manual optimization uses pe.GradSync instead, "
                "which supports unused parameters; leave it out"
            )
        sharded = [name for name, part in module.named_modules() if is_unit(part)]
        if sharded:
            raise TypeError(
                f"{type(module).__name__} has a module sharded by FSDP2 ({sharded[0]!r}), which DDP does not "
                "support: use ShardedWindowStrategy, and call fully_shard in configure_model"
            )

    def _engine(self, name: str, accumulate: int) -> Sync:
        is_bare = not self._module.automatic_optimization
        model = self._module.get_submodule(name) if is_bare else self.model
        assert model is not None
        # A `BaseFinetuning` callback has already frozen layers, and unfreezes them during the fit.
        trainer: Any = self._module.trainer  # its attribute `callbacks` is set elsewhere
        callbacks: list[Callback] = trainer.callbacks
        unfreezes = any(isinstance(each, BaseFinetuning) for each in callbacks)
        with _all_trained(model) if unfreezes else nullcontext():
            return engine_for(model, self._settings(accumulate), is_bare=is_bare)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: the engine registers its own hook."""


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    """Make all parameters require gradients inside the block, so that an engine can own all gradients."""
    frozen = [param for param in model.parameters() if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


class ShardedWindowStrategy(Windows, ModelParallelStrategy):
    """FSDP2 strategy that reduces gradients once per window.

    Accepts the arguments of `ModelParallelStrategy`. The module calls `fully_shard` in `configure_model`; the
    last call must be on a module that contains all trained parameters. All ranks are data-parallel unless
    `data_parallel_size` is given. Losses, hooks, clipping and manual optimization work as in
    `WindowStrategy`. The set of trained parameters is fixed when the fit begins. The class adds the following
    settings to those of `Windows`.

    Attributes:
        defer, defer_budget_mb: see `pe.attach`.

    Example:
        >>> trainer = Trainer(strategy=ShardedWindowStrategy(), accumulate_grad_batches=8)  # doctest: +SKIP
    """

    defer: Defer = "all"
    defer_budget_mb: float | None = None

    def setup_environment(self) -> None:
        """Create the mesh with all ranks along `data_parallel`; Lightning's default is one rank per node."""
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes
        if self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = 1
        if self._tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={self._tensor_parallel_size}: several ranks share each batch, which "
                "must be counted once, and no engine supports FSDP2 with tensor parallelism; leave it out "
                "(pe.GradSync with a device_mesh supports tensor parallelism without FSDP2)"
            )
        super().setup_environment()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run a backward; raise if a parameter was frozen or unfrozen after the start of the fit."""
        for (name, param), was_trained in zip(self._module.named_parameters(), self._trained, strict=True):
            if param.requires_grad != was_trained:
                raise RuntimeError(
                    f"{name!r} was frozen or unfrozen (by toggle_optimizer, or by toggle_model with several "
                    "optimizers), but FSDP2 fixes at a module's first forward which parameters get "
                    "gradients: freeze parameters in configure_model, or use WindowStrategy"
                )
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _check(self, module: LightningModule) -> None:
        super()._check(module)
        if isinstance(self.accumulate, Mapping):
            raise ValueError(  # noqa: TRY004 - another strategy accepts this type
                f"accumulate={dict(self.accumulate)!r} is not supported under FSDP2, which fixes at a "
                "submodule's first forward which parameters get gradients: toggle_optimizer could not "
                "exclude parameters of other submodules; use WindowStrategy, which does not shard, or one "
                "number for all submodules"
            )

    def _engine(self, name: str, accumulate: int) -> Sync:
        del name  # there is one engine for the whole module
        deferral = Deferral(self.defer, self.defer_budget_mb)
        self._trained = [param.requires_grad for param in self._module.parameters()]
        return engine_for(sharded_part(self._module), self._settings(accumulate), deferral=deferral)


class LogSteps(Callback):
    """Log the numbers of every `StepRecord` to the Trainer's loggers, as `pyengine/<name>`.

    With several engines the names are `pyengine/<submodule>/<name>`.

    Example:
        >>> trainer = Trainer(strategy=WindowStrategy(), callbacks=[LogSteps()])  # doctest: +SKIP
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, FSDPStrategy):
            raise TypeError(
                "LogSteps: strategy is an FSDPStrategy, but FSDP1 reduces gradients itself in every "
                "backward, which no engine supports: use ShardedWindowStrategy, and call fully_shard (FSDP2) "
                "in configure_model"
            )
        if not isinstance(strategy, Windows):
            raise TypeError(
                f"LogSteps: strategy is a {type(strategy).__name__}; expected a WindowStrategy or a "
                "ShardedWindowStrategy, which have steps to log"
            )
        for name, sync in strategy.syncs.items():
            sync.on_step(partial(_log, trainer, f"pyengine/{name}/" if name else "pyengine/"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """On an accelerator, log the record of the last step."""
        assert isinstance(trainer.strategy, Windows)
        for sync in trainer.strategy.syncs.values():
            sync.synchronize()


def _log(trainer: Trainer, prefix: str, record: StepRecord) -> None:
    metrics = {f"{prefix}{name}": value for name, value in numbers(record).items()}
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=record.step)


def sharded_part(module: LightningModule) -> nn.Module:
    """Return the only outermost sharded module in `module`, which must have all trained parameters."""
    units: dict[str, nn.Module] = {}
    inner: set[nn.Module] = set()
    for name, part in module.named_modules():  # an outer unit precedes the units inside it
        if is_unit(part) and part not in inner:
            units[name] = part
            inner.update(part.modules())
    kind = type(module).__name__
    if len(units) != 1:
        found = f"{len(units)} separate modules ({', '.join(map(repr, units))})" if units else "no module"
        raise TypeError(
            f"fully_shard was called on {found} of {kind}; expected one outermost module, whose forward "
            "training_step calls: call fully_shard in configure_model, first on the blocks, and last on a "
            "module with all trained parameters"
        )
    ((name, unit),) = units.items()
    inside = {id(param) for param in unit.parameters()}
    outside = [
        key for key, param in module.named_parameters() if param.requires_grad and id(param) not in inside
    ]
    if outside:
        raise TypeError(
            f"{outside[0]!r} of {kind} is trained, but is outside of {name!r}, on which fully_shard was "
            "called: its gradient would not be reduced; shard a module that contains it, or freeze it"
        )
    return unit
