"""The arguments of `plan`, and its settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pyengine.cli.arguments import above_zero, fill, whole

DESCRIPTION = """\
Show how a global batch is split over each number of workers, and its learning rate. The gradient of a step is
the mean over the global batch, however it is split. So rows with the same global batch train alike (except
for batch norm), with the same learning rate and steps an epoch; for a larger batch both change."""

EXAMPLES = """\
examples:
  python -m pyengine plan                                    256 on one device = 128 × 2 = 64 × 4 = 32 × 8
  python -m pyengine plan --micro-batch 8                    8 samples at a time fit a device
  python -m pyengine plan --workers 1,3,5 --micro-batch 8    uneven splits
  python -m pyengine plan --global-batch 256,1024,4096 --lr 0.1 --from-batch 256 --dataset-size 1281167
                                                             learning rates of larger batches

columns:
  workers       one rank each
  micro-batch   samples a backward; without --micro-batch all samples of a rank
  accumulate    micro-batches a rank and optimizer step: pe.GradSync(accumulate=...)
  lr linear     lr × global batch / from-batch: for SGD, with a warm-up (Goyal et al. 2017)
  lr sqrt       lr × √(global batch / from-batch): for Adam (Malladi et al. 2022)
  steps         optimizer steps in an epoch of --dataset-size samples

the same in Python:
  plan = pe.plan_batch(global_batch=256, micro_batch=8, world_size=4)    # plan.accumulate == 8
  lr = pe.scale_lr(0.1, from_batch=256, to_batch=plan.global_batch, rule="linear")

exit code: 0 every row can be run, 1 some cannot, 2 wrong arguments
"""


@dataclass(frozen=True)
class Settings:
    """What to plan.

    Attributes:
        micro_batch: samples a backward; None: all samples of a rank.
        lr: the learning rate of `from_batch`.
        dataset_size: samples; None: without steps an epoch.
    """

    global_batches: tuple[int, ...]
    workers: tuple[int, ...]
    micro_batch: int | None
    lr: float
    from_batch: int
    dataset_size: int | None
    json: bool


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--global-batch",
        dest="global_batches",
        type=_several,
        default=(256,),
        metavar="N,N",
        help="samples an optimizer step (default: 256)",
    )
    add(
        "--workers",
        type=_several,
        default=(1, 2, 4, 8),
        metavar="N,N",
        help="world sizes (default: 1,2,4,8)",
    )
    add(
        "--micro-batch",
        type=whole(1),
        metavar="N",
        help="samples a backward (default: all samples of a rank)",
    )
    add("--lr", type=above_zero, default=1.0, metavar="X", help="learning rate of --from-batch (default: 1)")
    add(
        "--from-batch",
        type=whole(1),
        metavar="N",
        help="global batch that --lr is tuned for (default: the first of --global-batch)",
    )
    add("--dataset-size", type=whole(1), metavar="N", help="samples of the dataset, for steps an epoch")


def settings(options: argparse.Namespace) -> Settings:
    return fill(Settings, options, from_batch=options.from_batch or options.global_batches[0])


def _several(text: str) -> tuple[int, ...]:
    parse = whole(1)
    return tuple(parse(part) for part in text.split(","))
