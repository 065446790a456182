"""The arguments of `study`, and the settings they become."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pyengine.cli.arguments import (
    Conflict,
    check_workers,
    different_wholes,
    each,
    finite_above_zero,
    number,
    whole,
)
from pyengine.cli.target import check_spelling
from pyengine.cli.tasks.base import MODELS

DESCRIPTION = """\
Train on several numbers of workers and batch sizes, with real local workers, and say what they buy:
throughput, speed-up and efficiency against one worker, time to a fixed accuracy, the share of a step that
waits for gradients, memory. Every run has processes of its own: one that fails, hangs or is killed is named,
and the study goes on. The same command goes on where it was stopped. Results: runs.jsonl, report.html and
plots/*.png in the folder --out."""

EXAMPLES = """\
examples:
  python -m pyengine study                                 cnn, 1,2,4,8 workers x global batches 32,64,128,256
  python -m pyengine study --model gpt --workers 1,2 --batch 16,32 --micro-batch 8
  python -m pyengine study --fixed per-worker --batch 32   each worker keeps its 32: the global batch grows
  python -m pyengine study --repeats 5 --target 0.95       more repeats (also later), time to 95 %
  python -m pyengine study --train mine:train --dataset-size 8192 --out mine-study

exit code: 0 every run ended well, 1 some did not (report and plots are written all the same), 2 the arguments
are wrong or nothing could be measured, 3 a file could not be written (what was measured stays), 130
interrupted

your own training is a function of an importable module that makes its model, engine and data, and calls
study.watch once, before the loop. Every optimizer step is then timed, and training ends by itself after
study.steps steps. mine.py:

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
      study.watch(sync, quality=accuracy)  # the only line that is there for study
      for epoch in range(10**6):
          sampler.set_epoch(epoch)
          for window in sync.windows(sampler):
              for rows in window:
                  loss = F.cross_entropy(model(data[rows]), label(data[rows]), reduction="sum")
                  sync.backward(loss, count=len(rows))
              sync.step(optimizer)

`quality` may be left out; it is called on every rank without gradients and outside of the timed steps, rank
0's number counts (larger is better), and other ranks may return None. A loop without pyengine calls
study.on_step(record) with a pyengine.StepRecord of its own after every optimizer step, in place of
study.watch's first argument, None.
"""

BUILT_IN = "pyengine.cli.study.subjects:{}"
FIXED = ("global", "per-worker")

_DATASET_SIZE = {"cnn": 1437, "gpt": 4096}
_LARGEST = {"cnn": 1437, "gpt": 31743}  # what the training parts of digits and standard library hold
_EPOCHS = {"cnn": 8.0, "gpt": 1.0}


@dataclass(frozen=True)
class Settings:
    """What to run, and how.

    Attributes:
        subject: what tables call it; `target` is where it is, as "module:function".
        fixed: whether `batches` are of all workers together ("global") or of each ("per-worker").
        dataset_size: training samples.
        epochs: how often a run goes through them.
        micro_batch: most samples in a backward; None: a worker's whole share of the batch.
        threads: torch's threads in each worker.
        evaluations: accuracies a run takes, about.
        goal: accuracy whose time is compared; None: the best one that every run reaches.
        stall_timeout_s: seconds without a step after which a run is ended.
        run_timeout_s: seconds after which a run is ended, whatever it does.
        folder: of the results.
        retry: whether runs that failed before are tried again.
        json: print JSON lines instead of tables.
    """

    subject: str
    target: str
    workers: tuple[int, ...]
    batches: tuple[int, ...]
    fixed: str
    dataset_size: int
    epochs: float
    repeats: int
    micro_batch: int | None
    threads: int
    evaluations: int
    goal: float | None
    seed: int
    stall_timeout_s: float
    run_timeout_s: float
    folder: Path
    retry: bool
    json: bool

    def binding(self) -> dict[str, object]:
        """Return what all runs of a folder share; the grid, the goal and the timeouts may change between
        commands.
        """
        names = (
            "subject",
            "fixed",
            "dataset_size",
            "epochs",
            "micro_batch",
            "threads",
            "evaluations",
            "seed",
        )
        return {name: getattr(self, name) for name in names}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add(
        "--workers",
        type=_numbers,
        default=(1, 2, 4, 8),
        metavar="N,N",
        help="(default: 1,2,4,8; has to hold 1)",
    )
    add("--batch", type=_numbers, default=(32, 64, 128, 256), metavar="N,N", help="(default: 32,64,128,256)")
    add(
        "--fixed",
        choices=FIXED,
        default="global",
        help="--batch is of all workers together, or of each, so that the whole grows (default: global)",
    )
    add("--model", choices=MODELS, help="built-in model (default: cnn)")
    add("--train", metavar="MODULE:FUNCTION", help="study this training function instead of a built-in one")
    add(
        "--dataset-size",
        type=whole(1),
        metavar="N",
        help=f"training samples ({each(_DATASET_SIZE)}; needed with --train)",
    )
    add(
        "--epochs",
        type=finite_above_zero,
        metavar="X",
        help=f"passes over them a run ({each(_EPOCHS)}, --train 1)",
    )
    add("--micro-batch", type=whole(1), metavar="N", help="most samples a backward (default: no limit)")
    add("--repeats", type=whole(1), default=3, metavar="N", help="runs a cell (default: 3)")
    add("--threads", type=whole(1), default=1, metavar="N", help="torch threads in each worker (default: 1)")
    add("--evaluations", type=whole(1), default=20, metavar="N", help="accuracies a run (default: 20)")
    add(
        "--target",
        type=_share,
        metavar="X",
        help="accuracy to compare times at, 0 to 1 (default: the best one that every run reaches)",
    )
    add("--seed", type=whole(0), default=0, metavar="N", help="of the first repeat (default: 0)")
    add(
        "--stall-timeout",
        type=finite_above_zero,
        default=120.0,
        metavar="S",
        help="end a run that takes no step for so many seconds (default: 120)",
    )
    add(
        "--run-timeout",
        type=finite_above_zero,
        default=3600.0,
        metavar="S",
        help="end any run then (default: 3600)",
    )
    add("--out", type=Path, default=Path("study"), metavar="FOLDER", help="results (default: study)")
    add("--retry", action="store_true", help="try runs again that failed or stalled before")
    add("--json", action="store_true", help="one JSON object a line on stdout instead of tables")


def settings(options: argparse.Namespace) -> Settings:
    """Turn parsed arguments into settings.

    Raises:
        Conflict: arguments that cannot go together or lack another, or more workers than this machine starts.
    """
    if 1 not in options.workers:
        got = ",".join(map(str, options.workers))
        raise Conflict(f"argument --workers: got {got}, need 1 among them: speed-up is against one worker")
    check_workers(options.workers)
    subject, target, dataset_size = _subject(options)
    return Settings(
        subject=subject,
        target=target,
        workers=options.workers,
        batches=options.batch,
        fixed=options.fixed,
        dataset_size=dataset_size,
        epochs=options.epochs or _EPOCHS.get(subject, 1.0),
        repeats=options.repeats,
        micro_batch=options.micro_batch,
        threads=options.threads,
        evaluations=options.evaluations,
        goal=options.target,
        seed=options.seed,
        stall_timeout_s=options.stall_timeout,
        run_timeout_s=options.run_timeout,
        folder=options.out,
        retry=options.retry,
        json=options.json,
    )


def _subject(options: argparse.Namespace) -> tuple[str, str, int]:
    """Return name, place and number of samples of what is trained."""
    size = options.dataset_size
    if options.train is None:
        model = options.model or "cnn"
        if size is not None and size > _LARGEST[model]:
            raise Conflict(f"argument --dataset-size: got {size}, and {model} has {_LARGEST[model]} samples")
        return model, BUILT_IN.format(model), size or _DATASET_SIZE[model]
    if options.model is not None:
        raise Conflict(
            f"argument --model: got {options.model} with --train {options.train}: leave one of them out"
        )
    check_spelling(options.train)
    if size is None:
        raise Conflict(
            f"argument --dataset-size: missing with --train {options.train}: say how many training samples "
            "it has, a run's steps are counted from it"
        )
    return options.train, options.train, size


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(different_wholes("for example 1,2,4")(text)))


def _share(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, need a share above 0 and up to 1: 0.95 is 95 %")
    return value
