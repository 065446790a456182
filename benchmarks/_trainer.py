"""Lightning's Trainer for `_peers.py`; a separate module, because it subclasses Lightning's classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pyengine.cli.bench import variants


def fit(variant: Any) -> None:
    """Train forever; every window waits in `variant.begin`, and writes its times to `variant.marks`."""
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        accumulate_grad_batches=len(variant.micro_batches),
        gradient_clip_val=variants.MAX_NORM,
        callbacks=[_Turns(variant)],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Module(variant), DataLoader(_Again(variant.micro_batches), batch_size=None))


class _Again(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, micro_batches: list[Tensor]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from self.micro_batches


class _Module(LightningModule):
    def __init__(self, variant: Any) -> None:
        super().__init__()
        self.model, self.made = variant.model, [variant.optimizer]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        return self.made[0]


class _Turns(Callback):
    def __init__(self, variant: Any) -> None:
        self.variant, self.num = variant, len(variant.micro_batches)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.num == 0:
            self.variant.begin()
            self.variant.marks.append(time.perf_counter())  # replaced if there are several micro-batches

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.num:
            self.variant.marks[1:] = [time.perf_counter()]

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % self.num == 0:
            self.variant.marks.append(time.perf_counter())
