"""The arguments and settings of `train`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch.distributed as dist

from pyengine.cli import trackers
from pyengine.cli.arguments import (
    Conflict,
    above_zero,
    check_absent,
    check_workers,
    check_writable,
    counts,
    each,
    fill,
    writing,
)
from pyengine.cli.files import make_folder, regular, written
from pyengine.cli.tasks.base import MODELS
from pyengine.cli.terminal import read_json
from pyengine.cli.trackers import Trackers
from pyengine.gradients.settings import Accumulator
from pyengine.wire.named import WIRES

DESCRIPTION = """\
Train on worker processes of this machine, one window of micro-batches per optimizer step. Then run the same
data through plain DistributedDataParallel and compare traffic, time and gradients. The data needs no
download: `gpt` uses the sources of Python's standard library, and `cnn` uses scikit-learn's digits."""

EXAMPLES = """\
examples:
  python -m pyengine train                                   both models, 2 ranks, 8 micro-batches per window
  python -m pyengine train --model gpt --wire bf16           half the bytes on the network
  python -m pyengine train --model gpt --wire int8-ef        a quarter of the bytes, with error feedback
  python -m pyengine train --model cnn --mode ddp-hook       keep the model in DDP
  python -m pyengine train --workers 4 --accumulate 2        more ranks, shorter windows
  python -m pyengine train --dtype bf16 --accumulator fp32   bf16 parameters, gradients summed in fp32
  python -m pyengine train --checkpoints runs/1              stop and resume at any time
  python -m pyengine train --wandb mine --tensorboard runs   also log every step to W&B and TensorBoard
  python -m pyengine train --mode ddp --json > ddp.jsonl     plain DDP, JSON lines
  python -m pyengine train --model gpt --trace trace.json    backward, buckets and waiting times in Perfetto

modes:
  engine    pe.GradSync: flat gradient buckets, reduced once per window
  ddp-hook  pe.attach on DistributedDataParallel: reduced once per window
  ddp       plain DDP: loss / accumulate, and an all-reduce in every backward

wires (docs/wires.md; ef: with error feedback):
""" + "".join(f"  {line}\n" for line in wrap(", ".join(WIRES), 98, break_on_hyphens=False))

MODES = ("engine", "ddp-hook", "ddp")


@dataclass(frozen=True)
class TrainSettings:
    """What to train, and how; the keys of every dict are the models."""

    models: tuple[str, ...]
    mode: str
    workers: int
    accumulate: int
    micro_batch: dict[str, int]
    steps: dict[str, int]
    lr: dict[str, float]
    dtype: str
    wire: str
    accumulator: Accumulator
    seed: int
    traces: dict[str, Path]  # Absolute paths of trace files (plots go to the same folder); empty: no traces.
    checkpoints: dict[str, Path]  # Absolute paths of folders; empty: no checkpoints.
    checkpoint_every: int  # Steps between two checkpoints.
    trackers: Trackers
    json: bool

    @property
    def kept(self) -> str:
        folders = " and ".join(map(str, self.checkpoints.values()))
        return (
            f"what was saved is in {folders}, and the same command resumes"
            if folders
            else "nothing was saved"
        )


# Defaults with which both models learn in about a minute on two cores.
_MICRO_BATCH = {"gpt": 4, "cnn": 8}
_STEPS = {"gpt": 50, "cnn": 40}
_LR = {"gpt": 3e-3, "cnn": 1e-2}
# Settings that must be the same to resume a training run; the learning rate schedule depends on `steps`.
_RESUMED = (
    "mode", "workers", "accumulate", "micro_batch", "steps", "lr", "dtype", "wire", "accumulator", "seed",
)  # fmt: skip


def add_to(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, counts(parser)
    add("--model", choices=MODELS, help="train only this model (default: gpt, then cnn)")
    add("--mode", choices=MODES, default="engine", help="what reduces the gradients (default: engine)")
    count("--workers", default=2, help="worker processes, one rank each (default: 2; torchrun sets its own)")
    count("--accumulate", default=8, help="micro-batches per window and rank (default: 8)")
    count("--micro-batch", help=f"samples per micro-batch ({each(_MICRO_BATCH)})")
    count("--steps", help=f"optimizer steps ({each(_STEPS)})")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of the parameters (default: fp32)")
    add("--wire", choices=tuple(WIRES), metavar="WIRE", help="encoding of reduced gradients (default: fp32)")
    add("--accumulator", choices=("fp32", "native"), help="dtype of a window's gradient sums (default: fp32)")
    add("--lr", type=above_zero, metavar="X", help=f"peak learning rate ({each(_LR)})")
    counts(parser, least=0)("--seed", default=0, help="seed of parameters and data order (default: 0)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a Chrome trace of a few more windows on rank 0 and, next to it, a plot of gradient norms "
        "and noise scale during training (not with --mode ddp); separate files for each model",
    )
    add(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save checkpoints here, including on a signal, and resume from the newest one",
    )
    count("--checkpoint-every", help="steps between checkpoints (default: 10)")
    trackers.add_to(parser)


def settings(options: argparse.Namespace) -> TrainSettings:
    """Return the settings; raise `Conflict` if arguments conflict with each other or with this machine."""
    without = {"wire": "no wire", "accumulator": "no accumulator", "checkpoints": "no pyengine state"}
    for name, lacks in without.items() if options.mode == "ddp" else ():
        remedy = "leave it out, or use --mode ddp-hook"
        check_absent(options, name, f"with --mode ddp, which has {lacks}: {remedy}")
    if options.checkpoints is None:
        check_absent(options, "checkpoint_every", "without --checkpoints: name a folder, or leave it out")
    if not dist.is_torchelastic_launched():
        check_workers([options.workers])
    models = MODELS if options.model is None else (options.model,)

    def by_model(given: Any, defaults: dict[str, Any]) -> dict[str, Any]:
        return {model: defaults[model] if given is None else given for model in models}

    return fill(
        TrainSettings,
        options,
        models=models,
        micro_batch=by_model(options.micro_batch, _MICRO_BATCH),
        steps=by_model(options.steps, _STEPS),
        lr=by_model(options.lr, _LR),
        wire=options.wire or "fp32",
        accumulator=options.accumulator or "fp32",
        traces=_traces(options.trace, models) if options.trace else {},
        trackers=Trackers.of(options),
        checkpoints=_folders(options.checkpoints, models) if options.checkpoints else {},
        checkpoint_every=options.checkpoint_every or 10,
    )


def check_resumed(settings: TrainSettings, model: str, folder: Path) -> None:
    """Raise `Conflict` if a folder has checkpoints with other settings; otherwise write the settings."""
    values = {name: getattr(settings, name) for name in _RESUMED}
    now = {name: value[model] if isinstance(value, dict) else value for name, value in values.items()}
    if dist.is_torchelastic_launched():
        now["workers"] = int(os.environ["WORLD_SIZE"])
    file = folder / "settings.json"
    if any(folder.glob("*.pt")) and file.exists():
        then = _read(file)
        for name, value in now.items():
            if value != then.get(name, value):
                raise Conflict(
                    f"argument --{name.replace('_', '-')}: got {value}, but the checkpoints in {folder} "
                    f"were saved by a run with --{name.replace('_', '-')} {then[name]}: pass that value to "
                    "resume, or specify another folder"
                )
    with writing("--checkpoints", f"write {file}"), written(file) as part:  # other ranks may be reading it
        part.write_text(json.dumps(now))


def _read(file: Path) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8", opener=regular) as opened:
            found = read_json(opened.read())
    except (OSError, ValueError) as error:
        found = error
    if not isinstance(found, dict):
        raise Conflict(
            f"argument --checkpoints: {file} has no settings of a training run ({found}): delete it to "
            "resume with the settings given now, or specify another folder"
        )
    return found


def _folders(folder: Path, models: tuple[str, ...]) -> dict[str, Path]:
    folders = {model: folder.absolute() / model for model in models}
    for path in folders.values():
        with writing("--checkpoints", f"create {path}"):
            folder.mkdir(parents=True, exist_ok=True)
            make_folder(path)
    return folders


def _traces(file: Path, models: tuple[str, ...]) -> dict[str, Path]:
    """Return the trace file of each model: `file` for a single model, otherwise "trace-gpt.json", etc."""
    file = file.absolute()
    if file.is_dir():
        raise Conflict(f"argument --trace: {file} is a folder: name a file, for example {file}/trace.json")
    stem, dot, ending = file.name.partition(".")
    names = [file.name] if len(models) == 1 else [f"{stem}-{model}{dot}{ending}" for model in models]
    files = [file.parent / name for name in names]
    for path in files:
        check_writable("--trace", path)
    return dict(zip(models, files, strict=True))
