"""The arguments and settings of `plan`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyengine.cli.arguments import above_zero, check_absent, counts, fill, whole

DESCRIPTION = """\
Show how a global batch is split over each number of workers, and the learning rate for the batch. The
gradient of a step is the mean over the global batch, however it is split. So rows with the same global batch
train alike (except for batch norm), with the same learning rate and number of steps per epoch; a larger batch
changes both."""

EXAMPLES = """\
examples:
  python -m pyengine plan                                    256 on one device = 128 × 2 = 64 × 4 = 32 × 8
  python -m pyengine plan --micro-batch 8                    8 samples at a time fit on a device
  python -m pyengine plan --workers 1,3,5 --micro-batch 8    uneven splits
  python -m pyengine plan --global-batch 256,1024,4096 --lr 0.1 --from-batch 256 --dataset-size 1281167
                                                             learning rates of larger batches
  python -m pyengine plan --from steps.jsonl --lr 3e-4       cost of other batches, from the measured noise

columns:
  workers       one rank each
  micro-batch   samples per backward; without --micro-batch, all samples of a rank
  accumulate    micro-batches per rank and optimizer step: pe.GradSync(accumulate=...)
  lr linear     lr × global batch / from-batch: for SGD, with a warm-up (Goyal et al. 2017)
  lr sqrt       lr × √(global batch / from-batch): for Adam (Malladi et al. 2022)
  steps         optimizer steps in an epoch of --dataset-size samples
with --from (McCandlish et al. 2018, arXiv:1812.06162; B_noise is the noise scale, B the global batch):
  steps         optimizer steps to the same loss, relative to the run: S = S_min (1 + B_noise / B)
  samples       samples to the same loss, relative to the run: E = E_min (1 + B / B_noise)
  lr noise      lr × (1 + B_noise / from-batch) / (1 + B_noise / B): for SGD

the same in Python:
  plan = pe.plan_batch(global_batch=256, micro_batch=8, world_size=4)    # plan.accumulate == 8
  lr = pe.scale_lr(0.1, from_batch=256, to_batch=plan.global_batch, rule="linear")

exit code: 0 every row can be run, 1 some cannot, 2 wrong arguments
"""


@dataclass(frozen=True)
class PlanSettings:
    """The settings of a plan."""

    global_batches: tuple[int, ...]  # Empty for several batches around the batch of `run_file`.
    workers: tuple[int, ...]
    micro_batch: int | None  # Samples per backward; None for all samples of a rank.
    lr: float  # Learning rate for `from_batch`.
    from_batch: int  # Global batch to which `lr` applies; 0 for the batch of `run_file`.
    dataset_size: int | None  # Number of samples; None omits the steps per epoch.
    run_file: Path | None  # Step records of a run with a noise scale; None to plan without a noise scale.
    json: bool


def add_to(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, counts(parser)
    several = partial(add, type=lambda text: tuple(map(whole(1), text.split(","))), metavar="N,N")
    batches = "samples per optimizer step (default: 256; with --from, several around the run's batch)"
    several("--global-batch", dest="global_batches", help=batches)
    several("--workers", help="world sizes (default: 1,2,4,8)")
    count("--micro-batch", help="samples per backward (default: all samples of a rank)")
    add("--lr", type=above_zero, default=1.0, metavar="X", help="learning rate for --from-batch (default: 1)")
    count("--from-batch", help="global batch for --lr (default: the first --global-batch or the run's batch)")
    add(
        "--from",
        dest="run_file",
        type=Path,
        metavar="FILE",
        help="instead estimate the cost of other batches from the noise scale in a run's JsonLines file",
    )
    count("--dataset-size", help="samples in the dataset, for steps per epoch")


def settings(options: argparse.Namespace) -> PlanSettings:
    """Return the settings; raise `Conflict` if arguments conflict with each other."""
    batches, from_batch = options.global_batches, options.from_batch
    if options.run_file is None:
        batches = batches or (256,)
        from_batch = from_batch or batches[0]
    else:
        for name in ("workers", "micro_batch", "dataset_size"):
            check_absent(options, name, "with --from, which splits no batch: leave one of the two out")
    return fill(
        PlanSettings,
        options,
        global_batches=batches or (),
        workers=options.workers or (1, 2, 4, 8),
        from_batch=from_batch or 0,
    )
