"""The arguments of `train`, and the settings they become."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch.distributed as dist

from pyengine.cli.arguments import Conflict, above_zero, check_workers, check_writable, each, whole
from pyengine.cli.tasks.base import MODELS
from pyengine.cli.wires import WIRES

DESCRIPTION = """\
Train on two or more worker processes of this machine, a window of micro-batches an optimizer step, then run
the same data through plain DistributedDataParallel and print what was saved. Data comes with every
installation: the sources of Python's standard library for `gpt`, scikit-learn's digits for `cnn`."""

EXAMPLES = (
    """\
examples:
  python -m pyengine train                                   both models, 2 workers, 8 micro-batches a window
  python -m pyengine train --model gpt --wire bf16           half the bytes on the network
  python -m pyengine train --model gpt --wire int8-ef        a quarter of them, with error feedback
  python -m pyengine train --model cnn --mode ddp-hook       keep DDP: pyengine drives its buckets and no_sync
  python -m pyengine train --workers 4 --accumulate 2        more ranks, shorter windows
  python -m pyengine train --dtype bf16 --accumulator fp32   bf16 parameters, gradients summed in fp32
  python -m pyengine train --checkpoints runs/1              may be stopped and started again at any moment
  python -m pyengine train --mode ddp --json > ddp.jsonl     plain DDP, one JSON object a line
  python -m pyengine train --model gpt --trace trace.json    see backward, buckets, exposed part in Perfetto

modes:
  engine    pe.GradSync owns flat gradient buckets; they travel once a window
  ddp-hook  pe.attach on DistributedDataParallel: its buckets travel once a window
  ddp       plain DDP: loss / accumulate, and every backward all-reduces

wires (docs/wires.md; ef: with error feedback):
"""
    + fill(", ".join(WIRES), width=100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    + "\n"
)

MODES = ("engine", "ddp-hook", "ddp")


@dataclass(frozen=True)
class Settings:
    """What to train, and how.

    Attributes:
        models: in order.
        steps, micro_batch, lr: by model.
        clip: largest gradient norm; inf leaves gradients alone.
        traces: by model, the files to write traces to, absolute; empty for none.
        checkpoints: by model, the folders to save to and to go on from, absolute; empty for none.
        checkpoint_every: steps between two of them.
        json: print JSON lines instead of tables.
    """

    models: tuple[str, ...]
    mode: str
    workers: int
    accumulate: int
    micro_batch: dict[str, int]
    steps: dict[str, int]
    lr: dict[str, float]
    dtype: str
    wire: str
    accumulator: str
    clip: float
    seed: int
    traces: dict[str, Path]
    checkpoints: dict[str, Path]
    checkpoint_every: int
    json: bool


# Small enough for two cores and a minute, long enough to see both models learn.
_MICRO_BATCH = {"gpt": 4, "cnn": 8}
_STEPS = {"gpt": 50, "cnn": 40}
_LR = {"gpt": 3e-3, "cnn": 1e-2}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--model", choices=MODELS, help="train only this one (default: gpt, then cnn)")
    add("--mode", choices=MODES, default="engine", help="who moves the gradients (default: engine)")
    add(
        "--workers",
        type=whole(1),
        default=2,
        metavar="N",
        help="processes, one rank each (default: 2; under torchrun its own)",
    )
    add(
        "--accumulate",
        type=whole(1),
        default=8,
        metavar="N",
        help="micro-batches a window, per rank (default: 8)",
    )
    add("--micro-batch", type=whole(1), metavar="N", help=f"items a backward ({each(_MICRO_BATCH)})")
    add("--steps", type=whole(1), metavar="N", help=f"optimizer steps ({each(_STEPS)})")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="type of the parameters (default: fp32)")
    add("--wire", choices=tuple(WIRES), metavar="WIRE", help="how gradients travel (default: fp32)")
    add("--accumulator", choices=("fp32", "native"), help="where a window's sum is kept (default: fp32)")
    add("--lr", type=above_zero, metavar="X", help=f"peak learning rate ({each(_LR)})")
    add("--clip", type=above_zero, default=1.0, metavar="X", help="gradient norm limit, or inf (default: 1)")
    add("--seed", type=whole(0), default=0, metavar="N", help="of parameters and data order (default: 0)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a Chrome trace of rank 0 in a few more windows; of several models FILE names each",
    )
    add(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save each model's training there, behind a signal too, and go on from what is there",
    )
    add("--checkpoint-every", type=whole(1), default=10, metavar="N", help="steps (default: 10)")
    add("--json", action="store_true", help="one JSON object a line on stdout instead of tables")


def settings(options: argparse.Namespace) -> Settings:
    """Turn parsed arguments into settings.

    Raises:
        Conflict: an argument was given that the mode or this machine cannot honour, or a file that cannot be
            written.
    """
    for name in ("wire", "accumulator"):
        got = getattr(options, name)
        if options.mode == "ddp" and got is not None:
            raise Conflict(
                f"argument --{name}: got {got} with --mode ddp, which has no {name}: leave it out, or use "
                "--mode ddp-hook"
            )
    if options.mode == "ddp" and options.checkpoints is not None:
        raise Conflict(
            f"argument --checkpoints: got {options.checkpoints} with --mode ddp, which has no state of "
            "pyengine's: leave it out, or use --mode ddp-hook"
        )
    if not dist.is_torchelastic_launched():
        check_workers([options.workers])
    models = MODELS if options.model is None else (options.model,)

    def by_model(given: Any, defaults: dict[str, Any]) -> dict[str, Any]:
        return {model: defaults[model] if given is None else given for model in models}

    return Settings(
        models=models,
        mode=options.mode,
        workers=options.workers,
        accumulate=options.accumulate,
        micro_batch=by_model(options.micro_batch, _MICRO_BATCH),
        steps=by_model(options.steps, _STEPS),
        lr=by_model(options.lr, _LR),
        dtype=options.dtype,
        wire=options.wire or "fp32",
        accumulator=options.accumulator or "fp32",
        clip=options.clip,
        seed=options.seed,
        traces=_traces(options.trace, models) if options.trace else {},
        checkpoints=_folders(options.checkpoints, models) if options.checkpoints else {},
        checkpoint_every=options.checkpoint_every,
        json=options.json,
    )


def _folders(folder: Path, models: tuple[str, ...]) -> dict[str, Path]:
    """Return the folder of each model's checkpoints, and make it."""
    folders = {model: folder.absolute() / model for model in models}
    try:
        for path in folders.values():
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Conflict(
            f"argument --checkpoints: cannot make {path} ({error.strerror}): name a folder of yours"
        ) from None
    return folders


def _traces(file: Path, models: tuple[str, ...]) -> dict[str, Path]:
    """Return the file of each model: the one given where there is one model,
    else "trace-gpt.json" for "trace.json".
    """
    file = file.absolute()
    stem, dot, ending = file.name.partition(".")
    names = [file.name] if len(models) == 1 else [f"{stem}-{model}{dot}{ending}" for model in models]
    files = [file.parent / name for name in names]
    for path in files:
        check_writable("--trace", path)
    return dict(zip(models, files, strict=True))
