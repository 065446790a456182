"""The arguments and settings of `verify`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pyengine.cli import target
from pyengine.cli.arguments import Conflict, check_workers, counts, different_names, different_wholes, fill
from pyengine.cli.tasks.base import MODELS
from pyengine.cli.verify.probe import WRAPS, needs
from pyengine.gradients.settings import Accumulator

DESCRIPTION = """\
Train for a few steps on several world sizes, and check that the runs are bitwise identical: parameters,
gradients, norm, optimizer state and buffers, after every step, on every rank. If they are not, report where
they first differ, and the likely cause. The first world size runs twice. Workers have one thread each, since
the number of threads changes the bits."""

EXAMPLES = """\
examples:
  python -m pyengine verify                                  the built-in models on 1, 2 and 3 workers
  python -m pyengine verify --model gpt --accumulator fp32   sums in fp32, whose rounding depends on the split
  python -m pyengine verify --train mine:train --workers 1,4 a training function of your own
  python -m pyengine verify --wrap own,ddp,fsdp,hsdp        the same bits however the model is wrapped

exit code: 0 identical, 1 not identical, 2 a run failed or wrong arguments

--train names a function in an importable module. The function creates its model, engine and data, and calls
verify.watch once, before the loop. Every optimizer step is then recorded, and the function is ended after
--steps steps. For example mine.py:

  import torch, pyengine as pe

  def train(verify):
      torch.manual_seed(0)
      model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
      data = torch.randn(480, 8)
      sampler = pe.WindowSampler(len(data), seed=0, micro_batch=4, global_batch=48)
      sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator="exact")
      optimizer = torch.optim.AdamW(model.parameters())
      verify.watch(model, optimizer=optimizer, sync=sync)  # the only line for verify
      for step, window in enumerate(sync.windows(sampler)):
          for index, rows in enumerate(window, start=sampler.first):
              with pe.micro_batch_rng(0, step=step, index=index):
                  sync.backward(model(data[rows]).square().sum(), count=len(rows))
          sync.clip_grad_norm_(1.0)
          sync.step(optimizer)

With --wrap, `sync, forward = verify.wrap(model, accumulate=..., accumulator="exact")` creates the engine;
create the optimizer after it.

`sync` may be left out (DDP without pyengine); the norm and the number of items are then not compared. The
function can read the command line's settings from verify.steps, verify.micro_batches and verify.accumulator.
"""

BUILT_IN = "pyengine.cli.verify.subjects:{}"


@dataclass(frozen=True)
class VerifySettings:
    """The settings of a verification."""

    subjects: dict[str, str]  # Training functions as "module:function", by their names in the report.
    workers: tuple[int, ...]  # World sizes; the first world size is the reference.
    steps: int
    micro_batches: int  # Micro-batches per window, over all ranks.
    accumulator: Accumulator
    wraps: tuple[str, ...]  # Entries of `WRAPS`; each is run on every world size that it supports.
    json: bool


def add_to(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, counts(parser)
    worlds = "world sizes; the first one always runs twice (default: 1,2,3)"
    add("--workers", type=different_wholes, default=(1, 2, 3), metavar="N,N", help=worlds)
    count("--steps", default=4, help="optimizer steps (default: 4)")
    count("--micro-batches", default=12, help="micro-batches in a window, over all workers (default: 12)")
    target.add_to(parser, (*MODELS, "both"), "both")
    sums = ("exact", "fp32")
    add("--accumulator", choices=sums, default="exact", help="how gradients are summed (default: exact)")
    add(
        "--wrap",
        type=different_names(WRAPS),
        default=("own",),
        metavar="NAME,NAME",
        help=f"owners of the gradients, from {', '.join(WRAPS)} (default: own)",
    )


def settings(options: argparse.Namespace) -> VerifySettings:
    """Return the settings; raise `Conflict` if arguments conflict with each other or with this machine."""
    check_workers(options.workers)
    for name in options.wrap:
        if all(needs(name, world) for world in options.workers):
            raise Conflict(
                f"argument --wrap: {name} on {', '.join(map(str, options.workers))} workers: "
                f"{needs(name, options.workers[0])}"
            )
    if options.train is not None:
        subjects = {options.train: options.train}
    else:
        models = MODELS if options.model in (None, "both") else (options.model,)
        subjects = {name: BUILT_IN.format(name) for name in models}
    return fill(VerifySettings, options, subjects=subjects, wraps=options.wrap)
