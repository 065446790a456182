"""The built-in training functions of `study`: the models of `train`."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pyengine.cli.study.probe import StudyProbe
from pyengine.cli.tasks.base import Task, make_optimizer
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask
from pyengine.data.batch_plan import scale_lr
from pyengine.data.sampler import WindowSampler
from pyengine.engine.grad_sync import GradSync

_BATCH = 64  # Global batch size to which the learning rates below apply.
_WARM_UP = 0.1  # Share of the steps in which the learning rate warms up.


def gpt(study: StudyProbe) -> None:
    _train(TextTask(), study, lr=2e-3)


def cnn(study: StudyProbe) -> None:
    _train(DigitsTask(), study, lr=5e-3)


def _train(task: Task, study: StudyProbe, *, lr: float) -> None:
    torch.manual_seed(study.seed)
    model = task.build()
    sync = GradSync(model, accumulate=study.accumulate)
    lr = scale_lr(lr, from_batch=_BATCH, to_batch=study.global_batch, rule="sqrt")
    steps = study.steps
    optimizer, schedule = make_optimizer(model, lr, steps=steps, warm_up_steps=_WARM_UP * steps)
    sampler = WindowSampler(
        study.dataset_size,
        seed=study.seed,
        micro_batch=study.micro_batch,
        global_batch=study.global_batch,
        drop_last=True,  # all steps then have the same size
    )
    study.watch(sync, quality=partial(_accuracy, task, model))
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for window in sync.windows(sampler):
            for rows in window:
                loss, count = task.loss(model, task.batch(torch.tensor(rows)))
                sync.backward(loss, count=count)
            sync.clip_grad_norm_(1.0)
            sync.step(optimizer, schedule)


def _accuracy(task: Task, model: nn.Module) -> float | None:
    return task.quality(model)["accuracy"] if dist.get_rank() == 0 else None
