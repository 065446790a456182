"""`--wandb` and `--tensorboard`: log runs to these trackers through the listeners of `pyengine.telemetry`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyengine.cli.arguments import Conflict, writing
from pyengine.cli.files import make_folder
from pyengine.step.step_record import StepRecord
from pyengine.telemetry import Listener, Wandb


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wandb", metavar="PROJECT", help="also log to this Weights & Biases project")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="also write event files here")


class Run:
    """A run in each tracker; without trackers, nothing is logged."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.wandb: Any = None
        self.writer: Any = None

    def __call__(self, record: StepRecord) -> None:
        for listener in self.listeners:
            listener(record)

    def log(self, values: Mapping[str, float], *, axis: str, at: int) -> None:
        """Log values by name, at position `at` of an axis."""
        if self.wandb is not None:
            for name in values:
                self.wandb.define_metric(name, step_metric=axis)
            self.wandb.log({axis: at, **values})
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, at)

    def image(self, title: str, path: Path) -> None:
        if self.wandb is not None:
            import wandb

            self.wandb.log({title: wandb.Image(str(path))})
        if self.writer is not None:
            from matplotlib.image import imread

            self.writer.add_image(title, imread(path), dataformats="HWC")


@dataclass(frozen=True)
class Trackers:
    """The trackers that the user has chosen: a W&B project, and the absolute path of an event file folder."""

    project: str | None = None
    folder: Path | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Trackers:
        """Return the trackers in the parsed arguments; raise `Conflict` if a package is not installed."""
        for name in ("wandb", "tensorboard"):
            if getattr(options, name) is not None and find_spec(name) is None:
                raise Conflict(
                    f"argument --{name}: {name} is not installed: run pip install '.[telemetry]' in a "
                    "clone of pyengine, or leave it out"
                )
        folder = options.tensorboard and options.tensorboard.absolute()
        if folder is not None:
            with writing("--tensorboard", f"create {folder}", "name a folder"):
                folder.mkdir(parents=True, exist_ok=True)
        return cls(options.wandb, folder)

    @contextmanager
    def run(self, name: str, *, group: str, config: Mapping[str, Any]) -> Iterator[Run]:
        """Open a run in each tracker: in W&B with a group, in TensorBoard as the folder `name`."""
        run = Run()
        with ExitStack() as stack:
            if self.project is not None:
                import wandb

                run.wandb = wandb.init(project=self.project, group=group, name=name, config=dict(config))
                stack.callback(run.wandb.finish)
                run.listeners.append(Wandb(run.wandb))
            if self.folder is not None:
                from torch.utils.tensorboard import SummaryWriter

                from pyengine.telemetry.tensorboard import TensorBoard

                make_folder(self.folder / name)
                board = TensorBoard(self.folder / name)
                stack.callback(board.close)
                run.listeners.append(board)
                run.writer = stack.enter_context(SummaryWriter(str(self.folder / name)))
            yield run
