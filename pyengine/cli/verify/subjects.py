"""The built-in training functions of `verify`: the models of `train`, with dropout."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.functional import dropout

from pyengine.cli.tasks.base import Task
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask
from pyengine.cli.verify.probe import VerifyProbe
from pyengine.data.rng import micro_batch_rng
from pyengine.data.sampler import WindowSampler

_SEED = 42
_MICRO_BATCH = 2


def gpt(verify: VerifyProbe) -> None:
    _train(TextTask(), verify)


def cnn(verify: VerifyProbe) -> None:
    _train(DigitsTask(), verify)


def _train(task: Task, verify: VerifyProbe) -> None:
    model = _build(task)
    size = _MICRO_BATCH * verify.micro_batches
    sampler = WindowSampler(task.num_samples, seed=_SEED, micro_batch=_MICRO_BATCH, global_batch=size)
    sync, forward = verify.wrap(model, accumulate=sampler.accumulate, accumulator=verify.accumulator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    verify.watch(model, optimizer=optimizer, sync=sync)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for step, window in enumerate(sync.windows(sampler), start=epoch * sampler.num_windows):
            for index, rows in enumerate(window, start=sampler.first):
                with micro_batch_rng(_SEED, step=step, index=index):
                    loss, count = task.loss(forward, task.batch(torch.tensor(rows)))
                    sync.backward(loss, count=count)
            sync.clip_grad_norm_(1.0)
            sync.step(optimizer)


def _build(task: Task) -> nn.Module:
    torch.manual_seed(_SEED)
    model = task.build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # running statistics depend on the world size
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    model.get_submodule("head").register_forward_pre_hook(lambda _, inputs: dropout(inputs[0], 0.1))
    return model
