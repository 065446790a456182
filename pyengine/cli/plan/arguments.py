"""The arguments of `plan`, and the settings they become."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pyengine.cli.arguments import above_zero, whole

DESCRIPTION = """\
Show how a global batch is split on each number of workers, and what its learning rate is. The gradient of a
step is the mean over the global batch however it is split, so rows with the same global batch train alike
(batch norm apart): the same learning rate, the same steps an epoch. Where the global batch grows, both
change."""

EXAMPLES = """\
examples:
  python -m pyengine plan                                    256 on one device = 128 × 2 = 64 × 4 = 32 × 8
  python -m pyengine plan --micro-batch 8                    8 at a time fit a device: the rest is accumulated
  python -m pyengine plan --workers 1,3,5 --micro-batch 8    what does not come out even
  python -m pyengine plan --global-batch 256,1024,4096 --lr 0.1 --from-batch 256 --dataset-size 1281167
                                                             larger batches, their rates and steps an epoch

columns:
  workers       one rank each
  micro-batch   samples a backward; without --micro-batch a rank's whole part
  accumulate    micro-batches between two optimizer steps, per rank: for pe.GradSync(accumulate=...)
  lr linear     lr × global batch / from-batch: for SGD, with a warm-up (Goyal et al. 2017)
  lr sqrt       lr × √(global batch / from-batch): for Adam (Malladi et al. 2022)
  steps         optimizer steps in an epoch of --dataset-size samples

the same in Python:
  plan = pe.plan_batch(global_batch=256, micro_batch=8, world_size=4)    # plan.accumulate == 8
  lr = pe.scale_lr(0.1, from_batch=256, to_batch=plan.global_batch, rule="linear")

exit code: 0 every row can be run, 1 some cannot, 2 the arguments are wrong
"""


@dataclass(frozen=True)
class Settings:
    """What to plan.

    Attributes:
        micro_batch: samples a backward; None is a rank's whole part of the global batch.
        lr: for `from_batch`.
        dataset_size: samples; None leaves the steps of an epoch out.
        json: print JSON lines instead of a table.
    """

    global_batches: tuple[int, ...]
    workers: tuple[int, ...]
    micro_batch: int | None
    lr: float
    from_batch: int
    dataset_size: int | None
    json: bool


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add(
        "--global-batch",
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
    add("--micro-batch", type=whole(1), metavar="N", help="samples a backward (default: a rank's whole part)")
    add("--lr", type=above_zero, default=1.0, metavar="X", help="learning rate for --from-batch (default: 1)")
    add(
        "--from-batch",
        type=whole(1),
        metavar="N",
        help="global batch that --lr is right for (default: the first of --global-batch)",
    )
    add("--dataset-size", type=whole(1), metavar="N", help="samples in the dataset, for steps an epoch")
    add("--json", action="store_true", help="one JSON object a line on stdout instead of a table")


def settings(options: argparse.Namespace) -> Settings:
    """Turn parsed arguments into settings."""
    return Settings(
        global_batches=options.global_batch,
        workers=options.workers,
        micro_batch=options.micro_batch,
        lr=options.lr,
        from_batch=options.from_batch or options.global_batch[0],
        dataset_size=options.dataset_size,
        json=options.json,
    )


def _several(text: str) -> tuple[int, ...]:
    parse = whole(1)
    return tuple(parse(part) for part in text.split(","))
