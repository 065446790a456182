"""The arguments and settings of `study`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyengine.cli import target as training
from pyengine.cli import trackers
from pyengine.cli.arguments import Conflict, above_zero, check_workers, counts, different_wholes, each, fill
from pyengine.cli.tasks.base import MODELS
from pyengine.cli.trackers import Trackers

DESCRIPTION = """\
Train with several numbers of workers and batch sizes on this machine, and report throughput, speed-up and
efficiency over one worker, time to an accuracy, time spent waiting for gradients, memory, and the gradient
noise scale. Every run has its own processes: a run that fails, hangs or is killed is reported, and the study
continues. The same command resumes a study that was stopped. Results: runs.jsonl, report.html, plots/*.png in
--out."""

EXAMPLES = """\
examples:
  python -m pyengine study                                 cnn, 1,2,4,8 workers x global batches 32,64,128,256
  python -m pyengine study --model gpt --workers 1,2 --batch 16,32 --micro-batch 8
  python -m pyengine study --fixed per-worker --batch 32   32 samples per worker: the global batch grows
  python -m pyengine study --repeats 5 --target 0.95       more repeats (now or later), time to 95 % accuracy
  python -m pyengine study --wandb mine                    steps, figures and plots in W&B, after all runs
  python -m pyengine study --train mine:train --dataset-size 8192 --out mine-study

exit code: 0 every run succeeded, 1 some did not (report and plots are written), 2 wrong arguments or nothing
was measured, 3 a file could not be written (earlier runs are kept), 130 interrupted

--train names a function in an importable module. The function creates its model, engine and data, and calls
study.watch once, before the loop. Every optimizer step is then timed, and the function is ended after
study.steps steps. For example mine.py:

  import torch, torch.nn.functional as F, pyengine as pe

  def train(study):
      torch.manual_seed(study.seed)
      model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
      data = torch.randn(study.dataset_size, 8)
      test = torch.randn(1000, 8)
      sampler = pe.WindowSampler(len(data), seed=study.seed, micro_batch=study.micro_batch,
                                 global_batch=study.global_batch, drop_last=True)
      sync = pe.GradSync(model, accumulate=study.accumulate)
      optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
      label = lambda x: (x.sum(1) > 0).long()
      accuracy = lambda: (model(test).argmax(1) == label(test)).float().mean()
      study.watch(sync, quality=accuracy)  # the only line for study
      for epoch in range(10**6):
          sampler.set_epoch(epoch)
          for window in sync.windows(sampler):
              for rows in window:
                  loss = F.cross_entropy(model(data[rows]), label(data[rows]), reduction="sum")
                  sync.backward(loss, count=len(rows))
              sync.step(optimizer)

`quality` may be left out. It is called on every rank under no_grad, between the timed steps; the value of
rank 0 counts (larger is better), and other ranks may return None. study.watch(..., noise_scale=False) leaves
out the gradient noise scale and its cost per step. A loop without pyengine passes None to study.watch
and calls study.on_step(record) with its own pyengine.StepRecord after every optimizer step.
"""

BUILT_IN = "pyengine.cli.study.subjects:{}"
FIXED = ("global", "per-worker")

_DATASET_SIZE = {"cnn": 1437, "gpt": 4096}
_LARGEST = {"cnn": 1437, "gpt": 31743}  # training samples of the digits and of the standard library
_EPOCHS = {"cnn": 8.0, "gpt": 1.0}


@dataclass(frozen=True)
class StudySettings:
    """The settings of a study: which runs to perform, and how."""

    subject: str  # The name in tables.
    target: str  # The function as "module:function".
    workers: tuple[int, ...]
    batches: tuple[int, ...]
    fixed: str  # Whether `batches` are for all workers together ("global") or for each worker ("per-worker").
    dataset_size: int  # Training samples.
    epochs: float  # Passes over the training samples in each run.
    repeats: int
    micro_batch: int | None  # Maximum samples per backward; None for a worker's whole share of the batch.
    threads: int  # torch's threads in each worker.
    evaluations: int  # Approximate number of evaluations per run.
    goal: float | None  # Accuracy at which times are compared; None for the best that every run reaches.
    seed: int
    stall_timeout_s: float  # A run is ended after this time without a step.
    run_timeout_s: float  # A run is ended after this time.
    folder: Path  # Folder of the results.
    retry: bool  # Whether to repeat runs that did not succeed.
    trackers: Trackers
    json: bool

    @property
    def kept(self) -> str:
        return f"what was measured is in {self.folder}, and the same command resumes"

    def binding(self) -> dict[str, object]:
        """Return the settings that all runs of a folder share; later commands may change the rest."""
        run = ("dataset_size", "epochs", "micro_batch", "threads", "evaluations", "seed")
        return {name: getattr(self, name) for name in ("subject", "fixed", *run)}


def _sorted_wholes(text: str) -> tuple[int, ...]:
    return tuple(sorted(different_wholes(text)))


def add_to(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, counts(parser)
    several = partial(add, type=_sorted_wholes, metavar="N,N")
    workers, batches = (1, 2, 4, 8), (32, 64, 128, 256)
    several("--workers", default=workers, help="numbers of workers, including 1 (default: 1,2,4,8)")
    several("--batch", dest="batches", default=batches, help="batch sizes (default: 32,64,128,256)")
    add(
        "--fixed",
        choices=FIXED,
        default="global",
        help="whether --batch is for all workers together or per worker (default: global)",
    )
    training.add_to(parser, MODELS, "cnn")
    count("--dataset-size", help=f"training samples ({each(_DATASET_SIZE)}; required with --train)")
    epochs = f"passes over the training samples ({each(_EPOCHS)}, --train 1)"
    add("--epochs", type=above_zero, metavar="X", help=epochs)
    count("--micro-batch", help="largest micro-batch (default: no limit)")
    count("--repeats", default=3, help="runs per combination of workers and batch (default: 3)")
    count("--threads", default=1, help="torch threads in each worker (default: 1)")
    count("--evaluations", default=20, help="evaluations per run (default: 20)")
    add(
        "--target",
        dest="goal",
        type=_share,
        metavar="X",
        help="accuracy at which to compare times, 0 to 1 (default: the best one that every run reaches)",
    )
    counts(parser, least=0)("--seed", default=0, help="seed of the first repeat (default: 0)")
    limit = partial(add, type=above_zero, metavar="S")
    stall = "end a run that takes no step for this many seconds (default: 120)"
    limit("--stall-timeout", dest="stall_timeout_s", default=120.0, help=stall)
    run = "end a run after this many seconds (default: 3600)"
    limit("--run-timeout", dest="run_timeout_s", default=3600.0, help=run)
    out = "folder of the results (default: study)"
    add("--out", dest="folder", type=Path, default=Path("study"), metavar="FOLDER", help=out)
    add("--retry", action="store_true", help="repeat runs that failed, stalled or timed out before")
    trackers.add_to(parser)


def settings(options: argparse.Namespace) -> StudySettings:
    """Return the settings; raise `Conflict` if arguments conflict with each other or with this machine."""
    if 1 not in options.workers:
        got = ",".join(map(str, options.workers))
        raise Conflict(f"argument --workers: got {got}, expected 1 among them, the baseline for speed-ups")
    check_workers(options.workers)
    subject, target, dataset_size = _subject(options)
    epochs = options.epochs or _EPOCHS.get(subject, 1.0)
    if epochs * dataset_size >= 2**53:
        raise Conflict(f"argument --epochs: got {epochs:g}, expected fewer than 2**53 samples in total")
    return fill(
        StudySettings,
        options,
        subject=subject,
        target=target,
        dataset_size=dataset_size,
        trackers=Trackers.of(options),
        epochs=epochs,
    )


def _subject(options: argparse.Namespace) -> tuple[str, str, int]:
    """Return the name and location of the training function, and the number of training samples."""
    size = options.dataset_size
    if options.train is None:
        model = options.model or "cnn"
        if size is not None and size > _LARGEST[model]:
            raise Conflict(f"argument --dataset-size: got {size}, but {model} has {_LARGEST[model]} samples")
        return model, BUILT_IN.format(model), size or _DATASET_SIZE[model]
    if size is None:
        raise Conflict(
            f"argument --dataset-size: missing with --train {options.train}: give its number of training "
            "samples, which determines the number of steps"
        )
    return options.train, options.train, size


def _share(text: str) -> float:
    value = above_zero(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a share above 0 and at most 1; 0.95 is 95 %")
    return value
