"""Training functions for `study`: a correct one, and others with errors or special cases."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import nn

import pyengine as pe
from pyengine.cli.study.probe import StudyProbe


def right(study: StudyProbe) -> None:
    """Train a classifier of the sign of a sum, on `dataset_size` samples."""
    torch.manual_seed(study.seed)
    model = nn.Linear(4, 2)
    data = torch.randn(study.dataset_size, 4, generator=torch.Generator().manual_seed(1))
    label = (data.sum(1) > 0).long()
    sync = pe.GradSync(model, accumulate=study.accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = pe.WindowSampler(
        len(data),
        seed=study.seed,
        micro_batch=study.micro_batch,
        global_batch=study.global_batch,
        drop_last=True,
    )
    study.watch(sync, quality=lambda: (model(data).argmax(1) == label).float().mean())
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        for window in sync.windows(sampler):
            for rows in window:
                loss = nn.functional.cross_entropy(model(data[rows]), label[rows], reduction="sum")
                sync.backward(loss, count=len(rows))
            sync.step(optimizer)


def sometimes(study: StudyProbe) -> None:
    """Train; but with the larger batch, a single worker fails and several workers hang."""
    if study.global_batch > 8 and study.workers == 1:
        raise ValueError("boom")
    if study.global_batch > 8:
        _say_pid(os.getpid())
        time.sleep(600 * dist.get_rank())
    right(study)


def _say_pid(pid: int) -> None:
    """Print the pid in one write: all ranks share a log, and `print` would write the newline separately."""
    print(f"pid {pid}\n", end="", flush=True)


EVALUATION_TICKS = 1000


def slow_evaluation(study: StudyProbe) -> None:
    """Step without delay, and evaluate slowly on rank 0 only; time is a counter that the ranks share."""
    store = dist.distributed_c10d._get_default_store()

    def quality() -> float:
        assert not torch.is_grad_enabled()
        time.sleep(0.1)  # gives the other ranks time to go on
        store.add("ticks", EVALUATION_TICKS)
        return 0.5

    clock = SimpleNamespace(perf_counter=lambda: float(store.add("ticks", 1)), process_time=time.process_time)
    with mock.patch("pyengine.cli.study.probe.time", clock):
        study.watch(None, quality=quality if dist.get_rank() == 0 else lambda: None)
        for step in range(study.steps):
            dist.all_reduce(torch.zeros(1))
            study.on_step(record(step))


def without_accuracy(study: StudyProbe) -> None:
    study.watch(None)
    for step in range(study.steps):
        study.on_step(record(step))


def noisy(study: StudyProbe) -> None:
    """Step with records of an engine whose counts are tokens, about four per sample."""
    study.watch(None)
    for step in range(study.steps):
        estimate = pe.NoiseEstimate(3.0, 1.0, 4.0 * step, 2.0, step)
        tokens = 4.0 * study.global_batch + (-1) ** step  # per window, on average four per sample
        last = replace(record(step), count=tokens, noise_scale=estimate if step % 2 == 0 else None)
        study.on_step(last)


def exact(study: StudyProbe) -> None:
    """Train with an engine that does not support the noise scale."""
    model = nn.Linear(1, 1)
    sync = pe.GradSync(model, accumulator="exact")
    study.watch(sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(study.steps):
        with sync.accumulate(last=True):
            sync.backward(model(torch.ones(1, 1)).sum(), count=1)
        sync.step(optimizer)


def without_noise_scale(study: StudyProbe) -> None:
    model = nn.Linear(1, 1)
    sync = pe.GradSync(model)
    study.watch(sync, noise_scale=False)
    sync.measure(pe.GradNorms(), pe.NoiseScale())  # accepted, since `watch` has not measured it
    raise RuntimeError("measured by itself")


def watches_nothing(study: StudyProbe) -> None:
    pass


def ends_early(study: StudyProbe) -> None:
    study.watch(None)
    study.on_step(record(0))


def watches_twice(study: StudyProbe) -> None:
    study.watch(None)
    study.watch(None)


def never_starts_the_clock(study: StudyProbe) -> None:
    study.on_step(record(0))


def says_nothing_on_rank_0(study: StudyProbe) -> None:
    study.watch(None, quality=lambda: None)


def beats_for_ever(study: StudyProbe) -> None:
    """Report progress forever without a step, with a child process such as a data loader has."""
    _say_pid(subprocess.Popen(["sleep", "600"]).pid)
    while True:
        study._beat(done=0)
        time.sleep(0.1)


def killed(study: StudyProbe) -> None:
    """Die from SIGKILL, which the kernel sends to a process that uses too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def record(step: int) -> pe.StepRecord:
    return pe.StepRecord(
        step=step,
        micro_batches=1,
        count=8.0,
        loss=1.0,
        grad_norm=1.0,
        skipped=False,
        reason="",
        bytes_on_wire=64,
        collectives=2,
        backward_s=0.5,
        exposed_sync_s=0.25,
        step_s=1.0,
    )


def lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def goes(pid: int) -> bool:
    for _ in range(600):
        if not lives(pid):
            return True
        time.sleep(0.1)
    return False
