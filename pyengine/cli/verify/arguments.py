"""The arguments of `verify`, and the settings they become."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pyengine.cli.arguments import Conflict, check_workers, different_wholes, whole
from pyengine.cli.target import check_spelling
from pyengine.cli.tasks.base import MODELS
from pyengine.cli.verify.wraps import WRAPS, needs

DESCRIPTION = """\
Train for a few steps on several world sizes, and say whether the runs are bitwise identical: parameters,
gradients, norm, optimizer state and buffers, after every step, on every rank. Where they are not, say where
they first part and what is likely to be the cause. The first world size runs twice, and one runs with small
buckets too. Workers have one thread each: their number changes the bits."""

EXAMPLES = """\
examples:
  python -m pyengine verify                                  the built-in models on 1, 2 and 3 workers
  python -m pyengine verify --model gpt --accumulator fp32   what plain fp32 sums do
  python -m pyengine verify --train mine:train --workers 1,4 your own training
  python -m pyengine verify --wrap own,ddp,fsdp,hsdp        the same bits over every way to wrap a model

exit code: 0 identical, 1 not identical, 2 a run failed or the arguments are wrong

your own training is a function of an importable module that makes its model, engine and data, and calls
verify.watch once, before the loop. Every optimizer step is then recorded, and training ends by itself after
--steps steps. mine.py:

  import torch, pyengine as pe

  def train(verify):
      torch.manual_seed(0)
      model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
      data = torch.randn(480, 8)
      sampler = pe.WindowSampler(len(data), seed=0, micro_batch=4, global_batch=48)
      sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator="exact")
      optimizer = torch.optim.AdamW(model.parameters())
      verify.watch(model, optimizer=optimizer, sync=sync)  # the only line that is there for verify
      for step, window in enumerate(sync.windows(sampler)):
          for index, rows in enumerate(window, start=sampler.first):
              with pe.micro_batch_rng(0, step=step, index=index):
                  sync.backward(model(data[rows]).square().sum(), count=len(rows))
          sync.clip_grad_norm_(1.0)
          sync.step(optimizer)

with --wrap the engine is made by `sync, forward = verify.wrap(model, accumulate=..., accumulator="exact")`,
and the optimizer behind it.

`sync` may be left out (DDP without pyengine): norm and number of items are then not compared. A function that
takes verify.steps, verify.micro_batches, verify.slots, verify.accumulator or verify.bucket_cap_mb follows the
command line; only one that takes verify.bucket_cap_mb runs with small buckets too.
"""

BUILT_IN = "pyengine.cli.verify.subjects:{}"


@dataclass(frozen=True)
class Settings:
    """What to verify.

    Attributes:
        subjects: training functions as "module:function", by the name they are reported under.
        workers: world sizes; the first one is what the others are compared with.
        micro_batches: in a window, over all ranks.
        slots: in how many slots exact sums cut the window; None: every micro-batch is one.
        wraps: who owns the gradients; every one runs on all of `workers` that it can.
        json: print JSON lines instead of tables.
    """

    subjects: dict[str, str]
    workers: tuple[int, ...]
    steps: int
    micro_batches: int
    slots: int | None
    accumulator: str
    wraps: tuple[str, ...]
    json: bool


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    worlds = different_wholes("for example 1,2,3 (the first one runs twice anyway)")
    add("--workers", type=worlds, default=(1, 2, 3), metavar="N,N", help="world sizes (default: 1,2,3)")
    add("--steps", type=whole(1), default=4, metavar="N", help="optimizer steps (default: 4)")
    add(
        "--micro-batches",
        type=whole(1),
        default=12,
        metavar="N",
        help="in a window, over all workers (default: 12)",
    )
    add(
        "--slots",
        type=whole(1),
        metavar="N",
        help="cut the window in slots, and sum exactly over them (default: every micro-batch is one)",
    )
    add("--model", choices=(*MODELS, "both"), help="built-in model (default: both)")
    add("--train", metavar="MODULE:FUNCTION", help="verify this training function instead of a built-in one")
    add(
        "--accumulator",
        choices=("exact", "fp32"),
        default="exact",
        help="how gradients are summed (default: exact)",
    )
    add(
        "--wrap",
        type=_wraps,
        default=("own",),
        metavar="NAME,NAME",
        help=f"who owns the gradients: some of {', '.join(WRAPS)} (default: own)",
    )
    add("--json", action="store_true", help="one JSON object a line on stdout instead of tables")


def settings(options: argparse.Namespace) -> Settings:
    """Turn parsed arguments into settings.

    Raises:
        Conflict: arguments that cannot go together, `--train` without a colon, or more workers than this
            machine starts.
    """
    check_workers(options.workers)
    for name in options.wrap:
        if all(needs(name, world) for world in options.workers):
            raise Conflict(
                f"argument --wrap: {name} on {', '.join(map(str, options.workers))} workers: "
                f"{needs(name, options.workers[0])}"
            )
    _check_slots(options)
    return Settings(
        subjects=_subjects(options.train, options.model),
        workers=options.workers,
        steps=options.steps,
        micro_batches=options.micro_batches,
        slots=options.slots,
        accumulator=options.accumulator,
        wraps=options.wrap,
        json=options.json,
    )


def _check_slots(options: argparse.Namespace) -> None:
    slots = options.slots
    if slots is None:
        return
    if options.accumulator != "exact":
        raise Conflict(f"argument --slots: got {slots} with --accumulator {options.accumulator}: need exact")
    if options.micro_batches % slots:
        raise Conflict(
            f"argument --slots: {slots} does not divide the {options.micro_batches} micro-batches of a window"
        )
    if uneven := [workers for workers in options.workers if slots % workers]:
        raise Conflict(f"argument --slots: {slots} cannot be dealt to {uneven[0]} workers in whole slots")


def _wraps(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    wrong = [name for name in names if name not in WRAPS]
    if wrong or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: need different ones of {', '.join(WRAPS)}")
    return names


def _subjects(train: str | None, model: str | None) -> dict[str, str]:
    if train is None:
        models = MODELS if model in (None, "both") else (model,)
        return {name: BUILT_IN.format(name) for name in models}
    if model is not None:
        raise Conflict(f"argument --model: got {model} with --train {train}: leave one of them out")
    check_spelling(train)
    return {train: train}
