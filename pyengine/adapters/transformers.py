"""The Transformers Trainer with windows: every gradient is the mean over the items of a window.

The Trainer counts the items of a window in advance, gathers the counts of all ranks, passes the total to the
model as the divisor, and multiplies the loss by the number of ranks. A loss that ignores this divisor (a
regression head, your own loss) is then too large. With windows, every loss is the mean over its micro-batch,
weighted by the number of items, and the engine divides by the number of items on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyengine.engine.sync import Sync
from pyengine.step.step_record import StepRecord
from pyengine.window.header import Count

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import unwrap_peft_model
    from transformers.training_args import OptimizerNames
except ImportError as error:
    raise ImportError(
        "pyengine.adapters.transformers needs transformers, which is not installed: pip install "
        "'.[adapters]' in a clone of pyengine"
    ) from error

from pyengine.adapters.accelerate import WindowAccelerator
from pyengine.adapters.engine_for import EngineSettings, abandon_open_window, allow_windows_of, is_window_new
from pyengine.gradients.fsdp.deferral import Defer, Deferral

if TYPE_CHECKING:
    _Mixed = transformers.Trainer  # the class that the mixin extends
else:
    _Mixed = object


class Windows(EngineSettings, _Mixed):
    """Mixin for a Trainer: `class MyTrainer(Windows, Seq2SeqTrainer)`.

    Set the attributes below in the class body. A class whose `training_step` runs its own backward must come
    after the mixin: `class Final(Windows, Mine)`, where `Mine` extends only the Trainer.

    `gradient_accumulation_steps`, `max_grad_norm`, `bf16` and the other TrainingArguments keep their meaning.
    Only `average_tokens_across_devices` is ignored, because the gradient and the logged loss are always means
    over the items of all ranks. Items are labels other than -100, shifted if the model's loss shifts labels.
    Without labels every micro-batch has the same weight; if `loss_is_scaled_for_ga` is True, the loss must
    then already be divided by the number of micro-batches in its window, as in the Trainer. A callback may
    change `args.gradient_accumulation_steps` between windows. If the data ends in the middle of a window, the
    window is short. If a callback stops the epoch or the training in the middle of a window, the window is
    dropped.

    Attributes:
        wire, accumulator, nonfinite: see `pe.GradSync`.
        defer, defer_budget_mb: under `fsdp=True` (FSDP2), see `pe.attach`.
        sync: the engine, available from `on_train_begin` on, for example to call `sync.on_step`.
    """

    defer: Defer = "all"
    defer_budget_mb: float | None = None
    _listens_to: Sync | None = None
    _epoch_steps: _EpochSteps | None = None
    _steps_at_fetch = 0

    @property
    def sync(self) -> Sync:
        sync: Sync = self.accelerator.sync
        return sync

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that attaches an engine to the model that it prepares."""
        super().create_accelerator_and_postprocess()
        args = self.args
        if args.n_gpu > 1:
            raise ValueError(
                f"args: n_gpu={args.n_gpu} in one process means DataParallel; expected one process per "
                "device: launch with torchrun"
            )
        if self.accelerator.num_processes > 1 and not self.accelerator.even_batches:
            raise ValueError(
                "args: accelerator_config has even_batches=False, so the Trainer's loop on a rank can end "
                "while other ranks still wait for it; leave even_batches=True"
            )
        if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO) or "layerwise" in args.optim:
            raise ValueError(
                f"args: optim={OptimizerNames(args.optim).value!r} steps inside the backward, before the "
                "window has ended; choose another optimizer"
            )
        settings = self._settings(args.gradient_accumulation_steps)
        deferral = Deferral(self.defer, self.defer_budget_mb)
        self.accelerator = _TrainerAccelerator(self.accelerator, settings, deferral)
        self.accelerator.wraps_anew = args.auto_find_batch_size

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch micro-batches without gathering counts over ranks; record whether the epoch has ended."""
        self._steps_at_fetch = self.args.gradient_accumulation_steps
        with self._counting_alone():
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._epoch_steps is not None:
            has_ended = len(batches) < num_batches or self.accelerator.gradient_state.end_of_dataloader
            self._epoch_steps.add(len(batches), has_ended=has_ended)
        return batches, num_items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one micro-batch; its loss is logged in the step of its window."""
        del num_items_in_batch  # the count of this rank's window; the engine counts each micro-batch
        last = self.accelerator.gradient_state.sync_gradients  # just set by the Trainer's loop
        steps = self.args.gradient_accumulation_steps
        self._follow(steps, last=last)
        with self._counting_alone(), self.sync.accumulate(last=last), self.accelerator.micro_batch(steps):
            device = self.args.device
            num = self._get_num_items_in_batch([inputs], device)
            items = None if num is None else torch.as_tensor(num, dtype=torch.int64, device=device)
            self.accelerator.items = items
            if items is None and self.loss_is_scaled_for_ga:
                self.accelerator.scale = self.current_gradient_accumulation_steps  # in this window
            else:
                self.current_gradient_accumulation_steps = 1  # the Trainer divides some losses by this number
            with _replaced(self.args, "gradient_accumulation_steps", self.accelerator.divisor):
                loss = super().training_step(model, inputs, None if items is None else items.clamp(min=1))
        return torch.zeros_like(loss)

    def _follow(self, steps: int, *, last: bool) -> None:
        """Pass the Trainer's window length, which a callback may have changed, to the engine."""
        # The Trainer's loop runs the first micro-batch of a window before a change in on_step_begin takes
        # effect.
        allow_windows_of(self.sync, steps + (steps != self._steps_at_fetch))
        if len(self.sync.due) == 1 and not last:
            size = self.sync.gradient_accumulation_steps
            raise RuntimeError(
                "change args.gradient_accumulation_steps between windows, for example in on_step_end: it was "
                f"set to {steps} in the middle of window {self.sync.window}, which was opened for at most "
                f"{size} micro-batches, and the Trainer's loop would now run more"
            )

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        abandon_open_window(self.sync)  # a callback may have stopped the last epoch or training
        is_resumed = options["epoch"] == options["epochs_trained"]
        done = options["steps_trained_in_current_epoch"] if is_resumed else 0
        windows = options["num_update_steps_per_epoch"] - done // self.args.gradient_accumulation_steps
        options["steps_in_epoch"] = self._epoch_steps = _EpochSteps(options["steps_in_epoch"])
        self._epoch_steps.begin(done, num_fetches=windows)
        super()._run_epoch(*args, **options)  # type: ignore[no-untyped-call]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_distributed_loading_by_transformers:
            raise ValueError(
                "model was sharded by from_pretrained(distributed_config=...), without Accelerate, so its "
                "ranks are unknown; load it unsharded, and pass TrainingArguments(fsdp=True)"
            )
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        # The Trainer sets this flag by the name of the loss, which models like GPT2LMHeadModel do not have.
        model = unwrap_peft_model(self.accelerator.unwrap_model(self.model))  # type: ignore[no-untyped-call]
        kinds = type(model).__mro__  # FSDP2 puts its own class first
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        self._loss_shifts_labels |= any(kind.__name__ in known for kind in kinds)
        if self._listens_to is not self.sync:
            self._listens_to = self.sync
            self.sync.on_step(self._add_loss)
        return prepared

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self._plain_optimizer():
            super()._save_optimizer_and_scheduler(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self._plain_optimizer():
            super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _plain_optimizer(self) -> AbstractContextManager[None]:
        """Expose the unwrapped optimizer, because PyTorch steps the optimizer to create missing state."""
        return _replaced(self, "optimizer", getattr(self.optimizer, "optimizer", self.optimizer))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log:
            self.sync.synchronize()  # on an accelerator the last record would otherwise come later
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _add_loss(self, record: StepRecord) -> None:
        loss: Tensor | float = math.nan if record.loss is None else record.loss
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            # As in the Trainer, use roughly the mean loss of the steps since the last log.
            loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss

    def _counting_alone(self) -> AbstractContextManager[None]:
        """Keep the Trainer from gathering counts and multiplying losses by the number of ranks."""
        return _replaced(self.args, "average_tokens_across_devices", False)


@contextmanager
def _replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if getattr(owner, name) is value:  # keep a new value that the body has set
            setattr(owner, name, kept)


class Trainer(Windows, transformers.Trainer):
    """`transformers.Trainer` with windows.

    Example:
        >>> from pyengine.adapters.transformers import Trainer  # doctest: +SKIP
        >>> Trainer(model=model, args=args, train_dataset=dataset).train()  # doctest: +SKIP
    """


# ---- integers that observe the Trainer's loop and losses ----


class _EpochSteps(int):
    """Number of micro-batches in an epoch; compares equal to the number after which the data ends.

    The Trainer's loop ends a short last window when the number of micro-batches equals `steps_in_epoch`. If
    the loader has no length, `steps_in_epoch` covers `max_steps` windows, and no epoch reaches this number.
    """

    def begin(self, done: int, *, num_fetches: int) -> None:
        """Set the number of micro-batches before the checkpoint, and the number of fetches after it."""
        self._fetched, self._fetches_left, self._end = done, num_fetches, int(self)

    def add(self, num: int, *, has_ended: bool) -> None:
        """Count micro-batches that the loop has fetched for a window."""
        self._fetched += num
        self._fetches_left -= 1
        if has_ended or self._fetches_left == 0:
            self._end = self._fetched

    def __eq__(self, other: object) -> bool:
        return other == self._end

    def __ne__(self, other: object) -> bool:
        return other != self._end

    __hash__ = int.__hash__


class _Divisor(int):
    """The value of `args.gradient_accumulation_steps` in a training step; records which losses it divides."""

    def __init__(self, steps: int) -> None:
        del steps  # already used by int.__new__
        self.divided: list[torch.autograd.graph.Node] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given: Sequence[Any] = (*args, *(kwargs or {}).values())
        plain = tree_map(lambda item: int(item) if isinstance(item, cls) else item, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        node = getattr(result, "grad_fn", None)
        if node is not None and node.name() == "DivBackward0":
            for divisor in given:
                if isinstance(divisor, cls):
                    divisor.divided.append(node)
        return result

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # a copy is a plain number

    def check(self, loss: Tensor) -> None:
        """Raise ValueError if the loss, or a part of the loss, was divided by this `_Divisor`."""
        nodes = [loss.grad_fn] if self.divided else []
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if node in self.divided:
                raise ValueError(
                    "do not divide the loss by args.gradient_accumulation_steps (in compute_loss or "
                    "training_step): the engine already divides by the number of items in the whole window, "
                    f"so dividing twice would make the gradient {int(self)} times too small"
                )
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]


class _TrainerAccelerator(WindowAccelerator):
    """An accelerator that multiplies the Trainer's mean loss by its number of items before the backward.

    Attributes:
        items: number of items in the current micro-batch on this rank; None if unknown.
        scale: factor that turns the loss into the mean over its micro-batch; not 1 if the Trainer's loss is
            already divided by the number of micro-batches in the window.
        divisor: number of micro-batches per window, by which losses must not be divided; None outside of
            a training step.
        wraps_anew: whether the Trainer wraps the model again for each batch size that it tries.
    """

    items: Tensor | None = None
    scale = 1
    divisor: _Divisor | None = None
    wraps_anew = False

    @property
    def gradient_accumulation_steps(self) -> int:
        """Accelerate's own number of accumulation steps, which is 1 in a Trainer."""
        return int(self._accelerator.gradient_accumulation_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        raise AttributeError(
            f"set args.gradient_accumulation_steps = {steps} instead, between windows: the Trainer's loop "
            "decides where a window ends"
        )

    @property
    def gradient_state(self) -> Any:
        """Accelerate's own `GradientState`, in which the Trainer's loop marks the end of a window."""
        return self._accelerator.gradient_state

    @contextmanager
    def micro_batch(self, steps: int) -> Iterator[None]:
        """Allow backwards inside the block; their losses must not be divided by `steps`."""
        self.divisor = _Divisor(steps)
        try:
            yield
        finally:
            self.divisor = None

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine only if the Trainer will prepare the model again.

        `train` calls this method first. If the model is not prepared again, training continues with the same
        engine.
        """
        return super().free_memory(*objects) if self.wraps_anew else self._accelerator.free_memory(*objects)

    def backward(self, loss: Tensor, *, count: Count | None = None, **options: Any) -> None:
        """Convert a mean loss over `items` to a sum, and run its backward."""
        if self.divisor is None:
            raise RuntimeError(
                "list Windows before the class whose training_step runs the backward: `class "
                "Final(Windows, Mine)`, where `class Mine(Trainer)` has the training_step. This backward ran "
                "outside of Windows.training_step, which opens the micro-batch"
            )
        if self.divisor > 1:
            self.divisor.check(loss)
        if self.items is not None:
            # Some models (T5, BERT) return nan as the mean over no items; the sum is 0.
            loss, count = torch.where(self.items > 0, loss * self.items, 0.0), self.items
        elif self.scale > 1:
            loss = loss * self.scale
        super().backward(loss, count=count, **options)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: `Windows.training_step` opens the micro-batch."""
        del models
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: the engine already knows which micro-batches do not end a window."""
        del model
        return nullcontext()

    def _check_end(self, call: str) -> None:
        """End the window before a step, if `training_step` ran no backward for the last micro-batch."""
        if self.sync_gradients:
            return
        try:
            self.sync.refuse_bare_gradients()
        except RuntimeError as error:
            raise RuntimeError(
                "call self.accelerator.backward(loss) in training_step, in place of loss.backward(), and "
                f"list Windows before its class, `class Final(Windows, Mine)`: {error}"
            ) from None
        with self.sync.accumulate(last=True) if is_window_new(self.sync) else nullcontext():
            pass  # this rank has no micro-batches in the window; other ranks may have some
        self.sync.flush()
