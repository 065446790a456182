"""The Transformers Trainer with windows: every gradient is the mean over the window's items.

The Trainer counts a window's items ahead, gathers the number from all ranks, passes it to the model as
divisor, and multiplies by the number of ranks again. A loss that does not divide by it (a regression head,
your own loss) is then too large. Here every loss is the mean over its own micro-batch, weighted by its items,
and the engine divides by the items of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pyengine.engine.sync import Sync
from pyengine.step.step_record import StepRecord
from pyengine.window.header import Count

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.training_args import OptimizerNames
except ImportError as error:
    raise ImportError(
        "pyengine.adapters.transformers needs transformers, which is not installed: pip install "
        "'.[adapters]' in a clone of pyengine"
    ) from error

from pyengine.adapters.accelerate import WindowAccelerator
from pyengine.adapters.engine_for import EngineSettings, abandon_open_window
from pyengine.gradients.fsdp.deferral import Defer, Deferral

if TYPE_CHECKING:
    _Mixed = transformers.Trainer  # the class that the mixin extends
else:
    _Mixed = object


class Windows(EngineSettings, _Mixed):
    """Mixin for a Trainer: `class MyTrainer(Windows, Seq2SeqTrainer)`.

    Set the attributes below in the class body. `gradient_accumulation_steps`, `max_grad_norm`, `bf16` and the
    other TrainingArguments keep their meaning, except `average_tokens_across_devices`: gradient and logged
    loss are means over the items of all ranks. Items are the labels that are not -100, shifted where the
    model's loss shifts them. Without labels every micro-batch has the same weight. A window in whose middle a
    callback stops the epoch or the training is dropped.

    Attributes:
        wire, accumulator, nonfinite: as for `pe.GradSync`.
        defer, defer_budget_mb: under `fsdp=True` (FSDP2), as for `pe.attach`.
        sync: the engine, from `on_train_begin` on: `on_step`.
    """

    defer: Defer = "all"
    defer_budget_mb: float | None = None
    _listens_to: Sync | None = None

    @property
    def sync(self) -> Sync:
        sync: Sync = self.accelerator.sync
        return sync

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which will attach windows to the model it prepares."""
        super().create_accelerator_and_postprocess()
        args = self.args
        if args.n_gpu > 1:
            raise ValueError(
                f"args: n_gpu={args.n_gpu} in one process is DataParallel; need one process a device: launch "
                "with torchrun"
            )
        if self.accelerator.num_processes > 1 and not self.accelerator.even_batches:
            raise ValueError(
                "args: accelerator_config has even_batches=False, and the Trainer's loop ends with its own "
                "rank's data, while others may still wait for it; leave it True"
            )
        if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO) or "layerwise" in args.optim:
            raise ValueError(
                f"args: optim={OptimizerNames(args.optim).value!r} steps inside the backward, where no "
                "window has ended; choose another"
            )
        settings = self._settings(args.gradient_accumulation_steps)
        deferral = Deferral(self.defer, self.defer_budget_mb)
        self.accelerator = _TrainerAccelerator(self.accelerator, settings, deferral)
        self.accelerator.wraps_anew = args.auto_find_batch_size

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch a window's micro-batches, without a gather over ranks."""
        abandon_open_window(self.sync)  # a callback has stopped the epoch, or the last training
        with self._counting_alone():
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one micro-batch; its loss is logged with the window's step."""
        del num_items_in_batch  # of this rank's window; the engine counts micro-batches
        self.current_gradient_accumulation_steps = 1  # the Trainer divides some losses by it
        last = self.accelerator.gradient_state.sync_gradients  # set by the Trainer's loop just now
        with self._counting_alone(), self.sync.accumulate(last=last):
            device = self.args.device
            num = self._get_num_items_in_batch([inputs], device)
            items = None if num is None else torch.as_tensor(num, dtype=torch.int64, device=device)
            self.accelerator.items = items
            loss = super().training_step(model, inputs, None if items is None else items.clamp(min=1))
        return torch.zeros_like(loss)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_distributed_loading_by_transformers:
            raise ValueError(
                "model was sharded by from_pretrained(distributed_config=...), without Accelerate, so its "
                "ranks are unknown; load it unsharded, and pass TrainingArguments(fsdp=True)"
            )
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        # The Trainer decides by the name of the loss, which models like GPT2LMHeadModel do not have.
        kinds = type(self.accelerator.unwrap_model(self.model)).__mro__  # FSDP2 puts its own class first
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
        """Expose the optimizer itself: to create missing states, PyTorch steps it."""
        return _replaced(self, "optimizer", getattr(self.optimizer, "optimizer", self.optimizer))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log:
            self.sync.synchronize()  # on an accelerator the last step's record would come later
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _add_loss(self, record: StepRecord) -> None:
        loss: Tensor | float = math.nan if record.loss is None else record.loss
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            # As in the Trainer, about the mean of the steps since the last log.
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
        setattr(owner, name, kept)


class Trainer(Windows, transformers.Trainer):
    """`transformers.Trainer` with windows.

    Example:
        >>> from pyengine.adapters.transformers import Trainer  # doctest: +SKIP
        >>> Trainer(model=model, args=args, train_dataset=dataset).train()  # doctest: +SKIP
    """


class _TrainerAccelerator(WindowAccelerator):
    """Multiplies the Trainer's mean loss by its number of items before the backward.

    Attributes:
        items: of the running micro-batch, on this rank; None if unknown.
        wraps_anew: whether every `train` wraps the model again, for another batch size.
    """

    items: Tensor | None = None
    wraps_anew = False

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine only where the Trainer prepares the model again.

        Otherwise the engine continues in `train`, which calls this first.
        """
        return super().free_memory(*objects) if self.wraps_anew else self._accelerator.free_memory(*objects)

    def backward(self, loss: Tensor, *, count: Count | None = None, **options: Any) -> None:
        """Run the backward of a mean over `items`, passed on as their sum."""
        if self.items is not None:
            # The mean over no items is nan in some models (T5, BERT), their sum is 0.
            loss, count = torch.where(self.items > 0, loss * self.items, 0.0), self.items
        super().backward(loss, count=count, **options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: the engine already knows which micro-batches are not the last."""
        del model
        return nullcontext()
