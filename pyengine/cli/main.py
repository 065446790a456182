"""Arguments to commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch.distributed as dist

from pyengine.cli import stopping, terminal
from pyengine.cli.arguments import Conflict
from pyengine.cli.bench import arguments as bench
from pyengine.cli.doctor import arguments as doctor
from pyengine.cli.plan import arguments as plan
from pyengine.cli.study import arguments as study
from pyengine.cli.train import arguments as train
from pyengine.cli.verify import arguments as verify

# What the extras `train` and `study` bring: import name to package.
_EXTRA = {
    "rich": "rich",
    "sklearn": "scikit-learn",
    "numpy": "numpy",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
    "psutil": "psutil",
}
_ON_TORCHRUNS_WORKERS = ("train", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None is this process's own.
    """
    terminal.show_everything()
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    refuse: Callable[[str], NoReturn] = options.error
    if options.command not in _ON_TORCHRUNS_WORKERS and dist.is_torchelastic_launched():
        refuse(f"torchrun has started this, but {options.command} starts its own workers: run it by python")
    try:
        settings = _COMMANDS[options.command][1].settings(options)
        # Only now: what it imports takes long, or is not there.
        run: Callable[[Any], int] = import_module(f"pyengine.cli.{options.command}.run").run
        with stopping.raised():
            code = run(settings)
            terminal.flush()
        return code
    except Conflict as error:
        refuse(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        is_in_train = options.command != "study" and missing in ("rich", "sklearn", "numpy")
        extra = "train" if is_in_train else "study"
        print(
            f"{options.command} needs {_EXTRA[missing]}, which is not installed: pip install '.[{extra}]' "
            "in a clone of pyengine",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        stopped = terminal.exit_code(error)
        if stopped is None:
            raise
        return stopped
    except (KeyboardInterrupt, SystemExit) as stop:
        return stopping.told(stop, "every worker has ended, nothing was saved")


# What each does, and its arguments (with the help's text); `run` of its folder runs it.
_COMMANDS: dict[str, tuple[str, Any]] = {
    "train": ("train small real models on this machine, and compare with plain DDP", train),
    "verify": ("train on several world sizes and say whether the runs are identical", verify),
    "plan": ("show how a global batch is split on any number of workers", plan),
    "study": ("train on a grid of workers and batch sizes, and say what they buy", study),
    "bench": ("measure kernels and whole windows here, against torch, DDP and its friends", bench),
    "doctor": ("say what works here, what does not, and how to mend it", doctor),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command; `error` of the parsed options ends with that command's usage."""
    parser = argparse.ArgumentParser(
        prog="python -m pyengine", description="Gradient synchronization and accumulation for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, about) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=about.DESCRIPTION,
            epilog=about.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        about.add_to(command)
        command.set_defaults(error=command.error)
    return parser
